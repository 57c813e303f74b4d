"""Dates: in the ledger in UTC or its time zone, in Python aware and in UTC."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from sqlalchemy import DateTime, Dialect
from sqlalchemy.dialects.mysql import DATETIME
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

from genie_ledger.errors import WrongDate


class _SqliteDate(UserDefinedType[str]):
    """Text: SQLite has no date type, and other programs may write any form that it understands."""

    cache_ok = True

    def get_col_spec(self, **_options: Any) -> str:
        return "DATETIME"


class Utc(TypeDecorator[datetime]):
    """A column without a time zone that holds UTC, or local times of `zone`. The column's Python
    values are aware and in UTC.

    A naive Python value counts as UTC. A local time that occurs twice, when clocks are set back,
    counts as the later occurrence. A local time that is skipped counts as if the clocks had not
    been set forward yet. So nothing expires early.
    """

    impl = DateTime
    cache_ok = True

    def __init__(self, zone: ZoneInfo | None = None) -> None:
        super().__init__()
        self.zone = zone

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the dialect's type: a date with microseconds, or text in SQLite."""
        if dialect.name == "sqlite":
            return dialect.type_descriptor(_SqliteDate())
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Convert a Python value to the column's value: a naive date in the column's time zone, or
        text for SQLite.
        """
        if value is None:
            return None
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        naive = _convert(aware, self.zone or UTC).replace(tzinfo=None)
        return naive.isoformat(" ", "milliseconds") if dialect.name == "sqlite" else naive

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - the overridden signature
        """Convert a value of the column to an aware date in UTC. Raises WrongDate if the value
        can't be parsed.

        A local time that occurs twice, when clocks are set back, is read as the later occurrence,
        so that the transfer does not expire early.
        """
        if value is None:
            return None
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if not isinstance(value, datetime):
            zone = "UTC" if self.zone is None else self.zone.key
            raise WrongDate(f"invalid date {value!r}: expected 'YYYY-MM-DD HH:MM:SS' in {zone}")
        if self.zone is None:
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        if value.tzinfo is not None:
            raise WrongDate(
                f"date '{value}' has an offset from UTC: with the time zone {self.zone.key} dates must have none"
            )
        # `fold` selects the first (0) or the second (1) occurrence of a local time that occurs twice.
        return max(_convert(value.replace(tzinfo=self.zone, fold=fold), UTC) for fold in (0, 1))


def _convert(value: datetime, zone: tzinfo) -> datetime:
    """Convert an aware date to a time zone. A result beyond Python's range becomes Python's first
    or last date.
    """
    try:
        return value.astimezone(zone)
    except OverflowError:
        return datetime.min.replace(tzinfo=zone) if value.year == 1 else datetime.max.replace(tzinfo=zone)


class utc_now(FunctionElement[datetime]):  # noqa: N801 - named as SQL's functions are
    """The database's clock in UTC, whatever the time zone of the session."""

    type = Utc()
    inherit_cache = True


@compiles(utc_now)
def _compile_for_postgresql(_element: utc_now, _compiler: object, **_options: object) -> str:
    return "timezone('utc', clock_timestamp())"


@compiles(utc_now, "mysql", "mariadb")
def _compile_for_mysql(_element: utc_now, _compiler: object, **_options: object) -> str:
    return "(UTC_TIMESTAMP(6))"


@compiles(utc_now, "sqlite")
def _compile_for_sqlite(_element: utc_now, _compiler: object, **_options: object) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now'))"
