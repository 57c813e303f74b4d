"""Dates as the ledger keeps them, and as Python programs have them: UTC everywhere."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, Dialect
from sqlalchemy.dialects.mysql import DATETIME
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

from genie.timeouts.errors import WrongDate


class _SqliteDate(UserDefinedType[str]):
    """A text: SQLite has no dates, and what others write may have any of the forms that it understands."""

    cache_ok = True

    def get_col_spec(self, **_options: Any) -> str:
        return "DATETIME"


class Utc(TypeDecorator[datetime]):
    """A column without a time zone that holds UTC. In Python its values are aware; what is naive counts as UTC."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """With microseconds where the kind of database has them."""
        if dialect.name == "sqlite":
            return dialect.type_descriptor(_SqliteDate())
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """From Python."""
        if value is None:
            return None
        utc = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return utc.isoformat(" ", "milliseconds") if dialect.name == "sqlite" else utc

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - its signature
        """To Python."""
        if value is None:
            return None
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if not isinstance(value, datetime):
            raise WrongDate(f"{value!r} is no date: one is written as 'YYYY-MM-DD HH:MM:SS', in UTC")
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class utc_now(FunctionElement[datetime]):  # noqa: N801 - named as SQL's functions are
    """The database's clock, whatever the time zone of the connection."""

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
