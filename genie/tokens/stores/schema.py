"""The tables of a token store in SQL, and whether those that are there will do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Index,
    Integer,
    MetaData,
    Row,
    Select,
    String,
    Table,
    Text,
    select,
    tuple_,
)
from sqlalchemy import inspect as inspector
from sqlalchemy.engine.interfaces import ReflectedColumn

from genie.errors import GenieError
from genie.tokens.token import Token

_KEY = Text().with_variant(Text(collation="C"), "postgresql")
"""What is looked up and sorted by: byte by byte, as no language would."""

_METADATA = MetaData()

TOKENS = Table(
    "tokens",
    _METADATA,
    Column("id", _KEY, primary_key=True),
    Column("owner", _KEY, nullable=False),
    Column("account", _KEY),
    Column("token_type", _KEY, nullable=False),
    Column("identifier", _KEY, nullable=False),
    Column("amount", BigInteger, CheckConstraint("amount > 0"), nullable=False),
    Column("issuer", Text),
    Column("notary", Text),
    Column("metadata", Text, nullable=False, server_default="{}"),
    Column("spent_by", Text),
)
"""Every token that was ever issued. `spent_by` is the transaction that has spent it, `metadata` is JSON."""

UNSPENT = TOKENS.c.spent_by.is_(None)
"""That a token was not spent: what the indexes are limited to."""

for _whose in ("owner", "account"):
    Index(
        f"tokens_unspent_by_{_whose}",
        *(TOKENS.c[name] for name in ("token_type", "identifier", _whose, "id")),
        postgresql_where=UNSPENT,
        sqlite_where=UNSPENT,
    )

CHANGES = Table(
    "token_changes",
    _METADATA,
    Column("sequence", Integer, primary_key=True),
    Column("changes", Text, nullable=False),
    sqlite_autoincrement=True,
)
"""SQLite only: what happened last, in the order in which it was committed."""


class WrongSchema(GenieError):
    """A table of this name is there, and tokens can't be kept in it."""


def ensure(connection: Connection, tables: Sequence[Table]) -> None:
    """Create the tables that are absent; WrongSchema says all that is wrong with those that are there."""
    there = set(inspector(connection).get_table_names())
    _METADATA.create_all(connection, [table for table in tables if table.name not in there], checkfirst=False)
    wrong = [
        f"table {table.name}: {problem}"
        for table in tables
        if table.name in there
        for problem in _problems(connection, table)
    ]
    if wrong:
        raise WrongSchema("; ".join(wrong))


def _problems(connection: Connection, table: Table) -> Iterator[str]:
    look = inspector(connection)
    found = {column["name"]: column for column in look.get_columns(table.name)}
    for column in table.columns:
        if column.name not in found:
            yield f"column {column.name} is missing"
        else:
            yield from _column_problems(column, found[column.name], connection.dialect.name)
    key = [column.name for column in table.primary_key]
    if look.get_pk_constraint(table.name)["constrained_columns"] != key:
        yield f"its primary key is not {', '.join(key)}"
    indexed = [index["column_names"] for index in look.get_indexes(table.name)]
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        names = [column.name for column in index.columns]
        if names not in indexed:
            yield f"there is no index on ({', '.join(names)}) where spent_by is null"


def _column_problems(column: Column[object], found: ReflectedColumn, dialect: str) -> Iterator[str]:
    if isinstance(column.type, String):
        kind, fits = "TEXT", isinstance(found["type"], String)
    else:
        wide = BigInteger if dialect == "postgresql" else Integer  # all of SQLite's integers have 64 bits
        kind, fits = "BIGINT", isinstance(found["type"], wide)
    if not fits:
        yield f"column {column.name} is {found['type']}, it must be {kind}"
    if column.nullable and not found["nullable"]:
        yield f"column {column.name} is NOT NULL, it must be nullable"


# -- Tokens as rows, and the pages that they are read in --------

PAGE = 1000
"""Tokens in a page of `unspent`."""

COLUMNS = [TOKENS.c[field.name] for field in fields(Token)]
"""What a token is made of, in the order in which it is made."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def row(token: Token) -> dict[str, Any]:
    """A token as the values of its row."""
    values = {column.name: getattr(token, column.name) for column in COLUMNS}
    values["metadata"] = _encode(dict(token.metadata)) if token.metadata else "{}"
    return values


def token(row: Row[Any]) -> Token:
    """The token of a row that was selected by `COLUMNS`, of which the metadata is the last."""
    plain: list[Any]
    *plain, metadata = row
    values = [*plain, {} if metadata == "{}" else json.loads(metadata)]
    return Token(*values)


def unspent_page(wanted: Mapping[str, str], after: Token | None) -> Select[Any]:
    """The unspent tokens whose columns have the wanted values, those behind `after`: at most a page.

    They come in the order of an index, of which a page is a stretch, whatever is wanted and however many were spent.
    """
    whose = "account" if "account" in wanted else "owner"
    order = [TOKENS.c[name] for name in ("token_type", "identifier", whose, "id") if name not in wanted]
    query = select(*COLUMNS).where(UNSPENT, *(TOKENS.c[name] == value for name, value in wanted.items()))
    if after is not None:
        query = query.where(tuple_(*order) > tuple_(*(getattr(after, column.name) for column in order)))
    return query.order_by(*order).limit(PAGE)
