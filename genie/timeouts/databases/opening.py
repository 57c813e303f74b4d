"""From a URL to a database, and from what drivers say to one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from genie.timeouts.databases.base import Database
from genie.timeouts.databases.mysql import Mysql
from genie.timeouts.databases.postgres import Postgres
from genie.timeouts.databases.sqlite import Sqlite
from genie.timeouts.errors import DatabaseFailed

_KINDS: dict[str, tuple[str, Callable[[URL], Database]]] = {
    "sqlite": ("aiosqlite", Sqlite),
    "postgresql": ("asyncpg", Postgres),
    "mariadb": ("asyncmy", Mysql),
    "mysql": ("asyncmy", Mysql),
}
_EXAMPLES = "sqlite:///ledger.db, postgresql://user:password@host/ledger or mysql://user:password@host/ledger"


def open_database(url: str) -> Database:
    """The database of a URL as SQLAlchemy writes them; the driver may be left out. Nothing is connected yet.

    ValueError for a URL that can't be right, and where a package is missing.
    """
    try:
        made = make_url(url)
        made.port  # noqa: B018 - it may be no number
        if "@" in (made.host or ""):
            raise ValueError(made.host)  # noqa: TRY301 - a password with an @, a part of which would be told in errors
    except (ArgumentError, ValueError):
        raise ValueError(f"the database's URL can't be read; it must be like {_EXAMPLES}") from None
    kind, _, driver = made.drivername.partition("+")
    if kind not in _KINDS or driver not in ("", _KINDS[kind][0]):
        known = ", ".join(f"{kind}+{driver}" for kind, (driver, _) in _KINDS.items())
        raise ValueError(f"no database of {made.drivername!r}: those of {known} can be had; as in {_EXAMPLES}")
    if kind in ("mariadb", "mysql") and not made.database:
        raise ValueError("the URL names no database: it must be like mysql://user:password@host/ledger")
    if "sslmode" in made.query:
        raise ValueError(
            "the URL has sslmode, which asyncpg calls ssl: postgresql://user:password@host/ledger?ssl=require"
        )
    driver, database = _KINDS[kind]
    try:
        return database(made.set(drivername=f"{kind}+{driver}"))
    except ModuleNotFoundError as error:
        raise ValueError(f"{kind} needs the package {error.name}: pip install 'genie-lock[sql]'") from None


@contextmanager
def translate_errors(database: Database) -> Iterator[None]:
    """What the driver, the database or the network says comes out as DatabaseFailed, in one line."""
    expected: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, TimeoutError, *database.driver_errors)
    try:
        yield
    except expected as error:
        said = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        text = " ".join(str(said).split()) or type(said).__name__
        raise DatabaseFailed(f"{database.name}: {text}") from error
