"""Fencing tokens in SQL: each row stores the greatest fencing token (fence) of its accesses, and rejects smaller ones.

A lock can time out while its holder is paused. When the holder continues, it writes without the lock, possibly while another
client holds it. `lock.fence` grows with every grant, so a database that stores the greatest fence of each row can reject
the late write.

**The fence must be stored when a row is read for a later write, not only when it is written.** If only writes had a fence,
the late write of holder 1 would be accepted between the read and the write of holder 2, and the write of holder 2 would
overwrite it:

    holder 1 (fence 33)          holder 2 (fence 34)          the row
    read 100                                                  100
    (paused, lock times out)
                                 locked, read 100             100, must store 34 from here on
    write 90 with fence 33                                    accepted, if the stored fence is still 33
                                 write 120 with fence 34      120: the write of 90 is lost

So each read is an UPDATE of the fence that returns the row. Two columns are enough for both modes of a lock. The rule is
timestamp ordering, with the fence as timestamp:

| Access                        | Rejected if the fence is smaller than | Stored in      |
|-------------------------------|---------------------------------------|----------------|
| read or write, exclusive lock | `fence` or `shared_fence`             | `fence`        |
| read, shared lock             | `fence`                               | `shared_fence` |

Shared locks need a column of their own, because several holders have such a lock at the same time, with different fences.
A holder must not reject another one, but each must reject an earlier exclusive holder.

A read needs no transaction. PostgreSQL, and SQLite since 3.35, have `UPDATE … RETURNING`: one statement stores the fence
and returns the row. MariaDB and MySQL need two statements: an UPDATE that stores the fence, then a SELECT that returns the
row with its fences. After the UPDATE no older holder can write. If a newer holder has stored its fence between the two
statements, the SELECT returns that fence, and the read is rejected. The SELECT has FOR UPDATE: under REPEATABLE READ, a
plain SELECT would return the snapshot of the transaction, which may be older than the UPDATE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import BigInteger, Column, ColumnElement, Connection, Row, Table, and_, case, literal, not_, or_, select
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.sql.dml import Insert, Update

from genie.errors import StaleFence

DIALECTS = ("postgresql", "sqlite", "mariadb", "mysql")

MAX_FENCE = 2**53 - 1
"""The greatest fence of the protocol."""


def _any_above(fence: int, columns: Iterable[Column[int]]) -> ColumnElement[bool]:
    """Return the SQL condition that any of the columns is greater than `fence`. NULL is never greater."""
    return or_(*(and_(column.is_not(None), column > fence) for column in columns))


class FencedTable:
    """Reads and writes rows of a table with the fencing token of a lock, and rejects holders of older locks.

    The table has a primary key, a column `fence` and, if rows are also read under shared locks, a column
    `shared_fence`. Both are nullable `BigInteger` columns; NULL means that the row was never used with a fence.

    Each method takes a `sqlalchemy.Connection`. With an `AsyncConnection` write

        row = await connection.run_sync(accounts.read, 2, fence=lock.fence)

    `key` is the value of the primary key, or a tuple of values if the primary key has several columns. `fence` is
    `lock.fence` of the lock that protects the row. No method commits or rolls back. Errors of all methods:

    - `StaleFence` if the row was used with a greater fence.
    - `LookupError` if the row does not exist.
    - `ValueError` or `TypeError` for invalid arguments, before anything is executed.
    - Errors of the database as SQLAlchemy raises them. A transaction that fails because of a concurrent
      transaction (serialization failure, deadlock, `database is locked`) has written nothing. Run it again.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._key_columns = tuple(table.primary_key)
        if not self._key_columns:
            raise ValueError(f"table {table.fullname} has no primary key, which identifies the row of a fence")
        if "fence" not in table.c:
            raise ValueError(f"table {table.fullname} has no column 'fence': add Column('fence', BigInteger)")
        self._fence_column: Column[int] = table.c.fence
        """The column with the greatest fence of exclusive locks."""
        self._shared_fence_column: Column[int] | None = table.c.get("shared_fence")
        """The column with the greatest fence of shared locks. If it is None, rows can't be read under shared locks."""
        for column in self._fence_columns():
            if not isinstance(column.type, BigInteger):
                raise TypeError(f"column {column} must be a BigInteger, not {column.type!r}: fences have up to 53 bits")

    def read(self, connection: Connection, key: Any, *, fence: int, shared: bool = False) -> Row[Any]:
        """Store the fence in a row, and return the row with all columns. `shared` is True under a shared lock.

        From then on the row rejects writes of older holders: until the end of the transaction because the database has
        locked the row, and after the commit because of the stored fence. A rollback discards the stored fence, so read the
        row again.
        """
        self._check_arguments(connection, fence)
        key_matches = self._key_condition(key)
        update = self._table.update().where(key_matches).values(self._fence_assignment(fence, shared=shared))
        row = self._execute_and_fetch(connection, update, key_matches)
        return self._check_row(row, key, fence, shared=shared)

    def read_or_create(
        self, connection: Connection, key: Any, values: Mapping[str, Any], *, fence: int, shared: bool = False
    ) -> Row[Any]:
        """Return a row as `read` does. If the row does not exist, first insert it, with `values`.

        `values` are not written to an existing row.

        Use this method instead of `read` for a row that may not exist. A missing row has no fence, so an older holder could
        still insert the row later. If `values` violate another unique constraint, the method raises SQLAlchemy's
        `IntegrityError`, or on MariaDB and MySQL a ValueError.
        """
        self._check_arguments(connection, fence)
        fence_column = self._require_shared_column() if shared else self._fence_column
        new_row = {**self._check_values(values), **self._key_values(key), fence_column.key: fence}
        dialect = connection.dialect
        if dialect.name in ("mariadb", "mysql"):
            # ON DUPLICATE KEY UPDATE needs an assignment. This one assigns a column to itself, which changes nothing.
            no_change = {self._key_columns[0].key: self._key_columns[0]}
            connection.execute(mysql.insert(self._table).values(new_row).on_duplicate_key_update(no_change))
            try:
                return self.read(connection, key, fence=fence, shared=shared)
            except LookupError:
                raise ValueError(
                    f"{self._table.fullname} {key!r} was not inserted: another row has the value of a unique column"
                ) from None
        insert = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
        upsert = (
            insert(self._table)
            .values(new_row)
            .on_conflict_do_update(index_elements=self._key_columns, set_=self._fence_assignment(fence, shared=shared))
        )
        row = self._execute_and_fetch(connection, upsert, self._key_condition(key))
        return self._check_row(row, key, fence, shared=shared)

    def write(self, connection: Connection, key: Any, values: Mapping[str, Any], *, fence: int) -> None:
        """Write columns of a row under an exclusive lock. One UPDATE checks the fence, and stores it with the columns.

        `values` maps names of columns to values or SQL expressions.
        """
        self._check_arguments(connection, fence)
        key_matches = self._key_condition(key)
        update = (
            self._table.update()
            .where(key_matches, not_(_any_above(fence, self._fence_columns())))
            .values({**self._check_values(values), self._fence_column.key: fence})
        )
        if connection.execute(update).rowcount == 0:  # the fence is stale, or the row did not exist
            row = self._select_current(connection, key_matches)
            self._check_row(row, key, fence, shared=False)
            raise LookupError(self._missing_row_text(key))  # the row was inserted between the UPDATE and the SELECT

    # -- statements ----------------------------------------------------------------------------------------------

    def _execute_and_fetch(
        self, connection: Connection, statement: Update | Insert, key_matches: ColumnElement[bool]
    ) -> Row[Any] | None:
        """Execute a statement that stores a fence in a row, and return the resulting row, or None if it does not exist.

        `key_matches` is the condition that selects the row, which a database without RETURNING needs.
        """
        if connection.dialect.update_returning:
            return connection.execute(statement.returning(*self._table.c)).first()
        connection.execute(statement)
        return self._select_current(connection, key_matches)

    def _select_current(self, connection: Connection, key_matches: ColumnElement[bool]) -> Row[Any] | None:
        """Return the current version of a row, or None. FOR UPDATE prevents reading an older snapshot."""
        return connection.execute(select(*self._table.c).where(key_matches).with_for_update()).first()

    def _fence_assignment(self, fence: int, *, shared: bool) -> dict[str, ColumnElement[int]]:
        """Return the SET clause that stores a fence, unless the row has a greater fence already."""
        column = self._require_shared_column() if shared else self._fence_column
        has_greater_fence = _any_above(fence, self._fence_columns())
        return {column.key: case((has_greater_fence, column), else_=literal(fence, BigInteger()))}

    def _key_condition(self, key: Any) -> ColumnElement[bool]:
        """Return the WHERE condition that selects the row with this primary key."""
        values = self._key_values(key)
        return and_(*(column == values[column.key] for column in self._key_columns))

    # -- columns -------------------------------------------------------------------------------------------------

    def _fence_columns(self) -> list[Column[int]]:
        """Return the column `fence`, and the column `shared_fence` if the table has it."""
        return [column for column in (self._fence_column, self._shared_fence_column) if column is not None]

    def _require_shared_column(self) -> Column[int]:
        """Return the column `shared_fence`, or raise ValueError if the table has none."""
        if self._shared_fence_column is None:
            raise ValueError(
                f"table {self._table.fullname} has no column 'shared_fence', which reads under a shared lock need: "
                "add Column('shared_fence', BigInteger)"
            )
        return self._shared_fence_column

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_arguments(self, connection: Connection, fence: int) -> None:
        """Raise TypeError or ValueError if the connection is unsupported or the fence is invalid."""
        if not isinstance(connection, Connection):
            raise TypeError(
                f"connection must be a sqlalchemy.Connection, not {type(connection).__name__}; with an AsyncConnection: "
                "await connection.run_sync(table.read, key, fence=lock.fence)"
            )
        if connection.dialect.name not in DIALECTS:
            raise ValueError(f"fences are supported in {', '.join(DIALECTS)}, not in {connection.dialect.name}")
        if type(fence) is not int:
            raise TypeError(f"fence must be an integer, the `fence` of a lock, not {fence!r}")
        if not 0 < fence <= MAX_FENCE:
            raise ValueError(f"fence must be from 1 to {MAX_FENCE}, not {fence}")

    def _key_values(self, key: Any) -> dict[str, Any]:
        """Return the values of the primary key's columns, by name. Raises ValueError if their number in `key` is wrong."""
        values = key if isinstance(key, tuple) else (key,)
        names = [column.key for column in self._key_columns]
        if len(values) != len(names):
            raise ValueError(f"the key of {self._table.fullname} is ({', '.join(names)}), not {key!r}")
        return dict(zip(names, values, strict=True))

    def _check_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the values to write. Raises ValueError for an unknown column, a key column or a fence column."""
        reserved = {column.key for column in (*self._key_columns, *self._fence_columns())}
        for name in values:
            if name not in self._table.c:
                raise ValueError(f"table {self._table.fullname} has no column {name!r}")
            if name in reserved:
                raise ValueError(f"values must not contain {name!r}: it comes from `key` or `fence`")
        return dict(values)

    def _check_row(self, row: Row[Any] | None, key: Any, fence: int, *, shared: bool) -> Row[Any]:
        """Return the row. Raises LookupError if it is None, and StaleFence if it was used with a greater fence.

        Under a shared lock, only the fences of exclusive locks count, because holders of shared locks do not reject each
        other.
        """
        if row is None:
            raise LookupError(self._missing_row_text(key))
        columns = [self._fence_column] if shared else self._fence_columns()
        greatest = max(row._mapping[column] or 0 for column in columns)  # noqa: SLF001 - a public API
        if greatest > fence:
            raise StaleFence(
                f"{self._table.fullname} {key!r} was used with fence {greatest}, which is greater than {fence}: "
                "another holder has locked it since",
                fence=fence,
                seen=greatest,
            )
        return row

    def _missing_row_text(self, key: Any) -> str:
        """Return the error message for a row that does not exist."""
        return f"{self._table.fullname} has no row {key!r}: use read_or_create to insert it under a fence"
