"""Compares the tables in a database with their definitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlalchemy import Column, Inspector, Table
from sqlalchemy.engine.interfaces import ReflectedColumn

from genie.errors import GenieError

__all__ = ["WrongSchema", "key_problems", "missing_column", "raise_problems", "reflected_columns", "wrong_type"]


class WrongSchema(GenieError):
    """A table does not match its definition, or does not exist and can't be created."""


def raise_problems(problems: Iterable[str]) -> None:
    """Raise WrongSchema with a list of the problems, if there are any."""
    message = "; ".join(problems)
    if message:
        raise WrongSchema(message)


def reflected_columns(inspector: Inspector, table: Table) -> dict[str, ReflectedColumn]:
    """Return the columns that `table` has in the database, by name."""
    return {column["name"]: column for column in inspector.get_columns(table.name)}


def key_problems(inspector: Inspector, table: Table) -> Iterator[str]:
    """Yield a problem if the primary key in the database differs from the definition `table`."""
    key_names = [column.name for column in table.primary_key]
    if inspector.get_pk_constraint(table.name)["constrained_columns"] != key_names:
        yield f"its primary key is not {', '.join(key_names)}"


def missing_column(column: Column[object]) -> str:
    """Return the text of a problem: a column does not exist in the database."""
    return f"column {column.name} is missing"


def wrong_type(column: Column[object], reflected: ReflectedColumn, expected: str) -> str:
    """Return the text of a problem: the column in the database, `reflected`, does not have the type `expected`."""
    return f"column {column.name} is {reflected['type']}, it must be {expected}"
