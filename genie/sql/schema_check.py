"""Comparing tables that exist with those that are expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlalchemy import Column, Inspector, Table
from sqlalchemy.engine.interfaces import ReflectedColumn

from genie.errors import GenieError


class WrongSchema(GenieError):
    """A table of an expected name exists, and lacks what is needed; or it does not exist and can't be created."""


def check(problems: Iterable[str]) -> None:
    """Raise one WrongSchema that names all problems, if there are any."""
    found = list(problems)
    if found:
        raise WrongSchema("; ".join(found))


def reflected_columns(inspector: Inspector, table: Table) -> dict[str, ReflectedColumn]:
    """Return the columns that a table has in the database, by name."""
    return {column["name"]: column for column in inspector.get_columns(table.name)}


def key_problems(inspector: Inspector, table: Table) -> Iterator[str]:
    """Compare the primary key."""
    key = [column.name for column in table.primary_key]
    if inspector.get_pk_constraint(table.name)["constrained_columns"] != key:
        yield f"its primary key is not {', '.join(key)}"


def missing_column(column: Column[object]) -> str:
    """Return the problem of a column that does not exist."""
    return f"column {column.name} is missing"


def wrong_type(column: Column[object], found: ReflectedColumn, expected: str) -> str:
    """Return the problem of a column of another type. `expected` describes the type that it should have."""
    return f"column {column.name} is {found['type']}, it must be {expected}"
