"""The tables of an SQL token store: definition, check, rows and queries."""

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
    Inspector,
    Integer,
    MetaData,
    Row,
    Select,
    String,
    Table,
    Text,
    inspect,
    select,
    tuple_,
)
from sqlalchemy.engine.interfaces import ReflectedColumn

from genie.sql.schema_check import key_problems, missing_column, raise_problems, reflected_columns, wrong_type
from genie_tokens.token import Token

_KEY = Text().with_variant(Text(collation="C"), "postgresql")
"""The type of columns for lookups and sorting: compared by bytes, not by the rules of a language.
"""

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
"""Every token that was ever issued. `spent_by` is the transaction that has spent the token, or
NULL; `metadata` is JSON.
"""

UNSPENT = TOKENS.c.spent_by.is_(None)
"""The condition that a token is unspent, to which the indexes are limited."""

for _holder in ("owner", "account"):
    Index(
        f"tokens_unspent_by_{_holder}",
        *(TOKENS.c[name] for name in ("token_type", "identifier", _holder, "id")),
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
"""SQLite only: the last payloads of changes, in commit order."""


def create_tables(connection: Connection, tables: Sequence[Table]) -> None:
    """Create the tables that don't exist, and check the existing tables. Raises WrongSchema with a
    list of all problems.
    """
    inspector = inspect(connection)
    existing = set(inspector.get_table_names())
    _METADATA.create_all(connection, [table for table in tables if table.name not in existing], checkfirst=False)
    raise_problems(
        f"table {table.name}: {problem}"
        for table in tables
        if table.name in existing
        for problem in _problems(inspector, table, connection.dialect.name)
    )


def _problems(inspector: Inspector, table: Table, dialect: str) -> Iterator[str]:
    """Describe each difference between an existing table and its definition."""
    reflected = reflected_columns(inspector, table)
    for column in table.columns:
        if column.name not in reflected:
            yield missing_column(column)
        else:
            yield from _column_problems(column, reflected[column.name], dialect)
    yield from key_problems(inspector, table)
    indexed = [index["column_names"] for index in inspector.get_indexes(table.name)]
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        names = [column.name for column in index.columns]
        if names not in indexed:
            yield f"it has no index on ({', '.join(names)}) where spent_by is null"


def _column_problems(column: Column[object], reflected: ReflectedColumn, dialect: str) -> Iterator[str]:
    """Describe how an existing column differs from its definition: in its type, or by a NOT NULL
    constraint where nulls are needed. A missing NOT NULL constraint is accepted.
    """
    if isinstance(column.type, String):
        expected, has_expected_type = "TEXT", isinstance(reflected["type"], String)
    else:
        integer_64 = BigInteger if dialect == "postgresql" else Integer  # all of SQLite's integers have 64 bits
        expected, has_expected_type = "BIGINT", isinstance(reflected["type"], integer_64)
    if not has_expected_type:
        yield wrong_type(column, reflected, expected)
    if column.nullable and not reflected["nullable"]:
        yield f"column {column.name} is NOT NULL, it must be nullable"


# -- rows and pages ---------------------------------------------------------------------------------------

PAGE = 1000
"""Tokens in a page of `unspent`."""

COLUMNS = [TOKENS.c[field.name] for field in fields(Token)]
"""The columns of a token, in the order of its constructor."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def row(token: Token) -> dict[str, Any]:
    """Return the column values of a token's row."""
    values = {column.name: getattr(token, column.name) for column in COLUMNS}
    values["metadata"] = _encode(dict(token.metadata)) if token.metadata else "{}"
    return values


def token_of(row: Row[Any]) -> Token:
    """Return the token of a row. The row has the columns `COLUMNS`, of which the last is the metadata."""
    values: list[Any]
    *values, metadata = row
    values.append({} if metadata == "{}" else json.loads(metadata))
    return Token(*values)


def unspent_page(filters: Mapping[str, str], after: Token | None) -> Select[Any]:
    """Select the next page of the unspent tokens that match the filters, after the token `after`.

    `filters` maps column names to values. The rows are sorted in the order of an index of unspent
    tokens. So the database reads only the page's range of this index, whatever the filters are.
    """
    holder = "account" if "account" in filters else "owner"
    order = [TOKENS.c[name] for name in ("token_type", "identifier", holder, "id") if name not in filters]
    query = select(*COLUMNS).where(UNSPENT, *(TOKENS.c[name] == value for name, value in filters.items()))
    if after is not None:
        query = query.where(tuple_(*order) > tuple_(*(getattr(after, column.name) for column in order)))
    return query.order_by(*order).limit(PAGE)
