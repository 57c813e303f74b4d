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

from genie.timeouts.errors import WrongDate


class _SqliteDate(UserDefinedType[str]):
    """Text: SQLite has no date type, and other programs may write any form that it understands."""

    cache_ok = True

    def get_col_spec(self, **_options: Any) -> str:
        return "DATETIME"


class Utc(TypeDecorator[datetime]):
    """A column without a time zone that holds UTC, or local times of `zone`. Its Python values are
    aware and in UTC.

    A naive Python value counts as UTC. A local time that occurs twice, when clocks are set back,
    counts as the second; one that is skipped counts as if the clocks had not been set forward yet.
    So nothing expires early.
    """

    impl = DateTime
    cache_ok = True

    def __init__(self, zone: ZoneInfo | None = None) -> None:
        super().__init__()
        self.zone = zone

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Use microseconds where the database has them."""
        if dialect.name == "sqlite":
            return dialect.type_descriptor(_SqliteDate())
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Convert from Python."""
        if value is None:
            return None
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        plain = _moved_to(self.zone or UTC, aware).replace(tzinfo=None)
        return plain.isoformat(" ", "milliseconds") if dialect.name == "sqlite" else plain

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - its signature
        """Convert to Python. WrongDate if it is not a date."""
        if value is None:
            return None
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if not isinstance(value, datetime):
            zone = "UTC" if self.zone is None else self.zone.key
            raise WrongDate(f"{value!r} is not a date: it must be like 'YYYY-MM-DD HH:MM:SS', in {zone}")
        if self.zone is None:
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        if value.tzinfo is not None:
            raise WrongDate(
                f"'{value}' has an offset from UTC: with the time zone {self.zone.key} dates must have none"
            )
        return max(_moved_to(UTC, value.replace(tzinfo=self.zone, fold=fold)) for fold in (0, 1))


def _moved_to(zone: tzinfo, value: datetime) -> datetime:
    """Convert to a time zone. Dates beyond Python's range become its first or last one."""
    try:
        return value.astimezone(zone)
    except OverflowError:
        return datetime.min.replace(tzinfo=zone) if value.year == 1 else datetime.max.replace(tzinfo=zone)


class utc_now(FunctionElement[datetime]):  # noqa: N801 - named as SQL's functions are
    """The database's clock in UTC, whatever the time zone of the session."""

    type = Utc()
    inherit_cache = True


@compiles(utc_now)
def _standard(_element: utc_now, _compiler: object, **_options: object) -> str:
    return "timezone('utc', clock_timestamp())"


@compiles(utc_now, "mysql", "mariadb")
def _mysql(_element: utc_now, _compiler: object, **_options: object) -> str:
    return "(UTC_TIMESTAMP(6))"


@compiles(utc_now, "sqlite")
def _sqlite(_element: utc_now, _compiler: object, **_options: object) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now'))"
