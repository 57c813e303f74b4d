"""Creating the `Database` of a URL, and translating its errors to one-line messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from genie_ledger.databases.base import Database
from genie_ledger.databases.mysql import Mysql
from genie_ledger.databases.postgres import Postgres
from genie_ledger.databases.sqlite import Sqlite
from genie_ledger.errors import DatabaseFailed


class _Backend(NamedTuple):
    """How a kind of database is used: its driver, the extra with the driver, and the function that creates its `Database`."""

    driver: str
    extra: str
    create: Callable[[URL], Database]


_BACKENDS = {
    "sqlite": _Backend("aiosqlite", "sqlite", Sqlite),
    "postgresql": _Backend("asyncpg", "postgres", Postgres),
    "mariadb": _Backend("asyncmy", "mysql", Mysql),
    "mysql": _Backend("asyncmy", "mysql", Mysql),
}
_EXAMPLES = "sqlite:///ledger.db, postgresql://user:password@host/ledger or mysql://user:password@host/ledger"


def open_database(url: str) -> Database:
    """Return the database of an SQLAlchemy URL, which need not name the driver. No connection is
    opened yet.

    Raises ValueError if the URL is invalid, or if the driver is not installed.
    """
    try:
        parsed = make_url(url)
        parsed.port  # noqa: B018 - raises ValueError if the port is not a number
        if "@" in (parsed.host or ""):  # an unescaped @ in the password, which would appear in later errors
            raise ValueError(parsed.host)  # noqa: TRY301
    except (ArgumentError, ValueError):
        raise ValueError(f"invalid database URL; it must be like {_EXAMPLES}") from None
    dialect, _, driver = parsed.drivername.partition("+")
    if dialect not in _BACKENDS or driver not in ("", _BACKENDS[dialect].driver):
        supported = ", ".join(f"{dialect}+{backend.driver}" for dialect, backend in _BACKENDS.items())
        raise ValueError(f"unknown database {parsed.drivername!r}: it must be one of {supported}; as in {_EXAMPLES}")
    if dialect in ("mariadb", "mysql") and not parsed.database:
        raise ValueError("the URL names no database: it must be like mysql://user:password@host/ledger")
    if "sslmode" in parsed.query:
        raise ValueError(
            "the URL has sslmode, which asyncpg calls ssl: postgresql://user:password@host/ledger?ssl=require"
        )
    backend = _BACKENDS[dialect]
    try:
        return backend.create(parsed.set(drivername=f"{dialect}+{backend.driver}"))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{dialect} needs the package {error.name}: pip install 'genie-ledger[{backend.extra}]'"
        ) from None


@contextmanager
def translate_errors(database: Database) -> Iterator[None]:
    """Raise DatabaseFailed with a one-line message for any error of the driver, database or
    network.
    """
    expected: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, TimeoutError, *database.driver_errors)
    try:
        yield
    except expected as error:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        text = " ".join(str(cause).split()) or type(cause).__name__
        raise DatabaseFailed(f"{database.name}: {text}") from error
