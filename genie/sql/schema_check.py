"""Comparing tables that exist in a database with their definitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlalchemy import Column, Inspector, Table
from sqlalchemy.engine.interfaces import ReflectedColumn

from genie.errors import GenieError


class WrongSchema(GenieError):
    """A table of an expected name exists, and lacks what is needed; or it does not exist and can't
    be created.
    """


def check(problems: Iterable[str]) -> None:
    """Raise one WrongSchema that lists all problems, if there are any."""
    texts = list(problems)
    if texts:
        raise WrongSchema("; ".join(texts))


def reflected_columns(inspector: Inspector, table: Table) -> dict[str, ReflectedColumn]:
    """Return the columns that a table has in the database, by name."""
    return {column["name"]: column for column in inspector.get_columns(table.name)}


def key_problems(inspector: Inspector, table: Table) -> Iterator[str]:
    """Describe a primary key that differs from the table's definition."""
    key = [column.name for column in table.primary_key]
    if inspector.get_pk_constraint(table.name)["constrained_columns"] != key:
        yield f"its primary key is not {', '.join(key)}"


def missing_column(column: Column[object]) -> str:
    """Describe a column that does not exist in the database."""
    return f"column {column.name} is missing"


def wrong_type(column: Column[object], reflected: ReflectedColumn, expected: str) -> str:
    """Describe a column whose type in the database is not the `expected` one."""
    return f"column {column.name} is {reflected['type']}, it must be {expected}"
