"""Fencing tokens in SQL: a row remembers the greatest fence that it was used with and refuses smaller ones.

A lock can time out while its holder is paused. The holder then writes under a lock that another client has been granted
since. `lock.fence` grows with every grant, so the database can tell the two holders apart, if it remembers the fence.

**The fence must be remembered when a row is read for a later write, not only when it is written.** If only writes
carried a fence, the late write of holder 1 would be accepted between the read and the write of holder 2, and the write
of holder 2 would overwrite it:

    holder 1 (fence 33)          holder 2 (fence 34)          the row
    read 100                                                  100
    (paused, lock times out)
                                 locked, read 100             100, must remember 34 from here on
    write 90 with fence 33                                    accepted, if the greatest fence seen is still 33
                                 write 120 with fence 34      120: the write of 90 is lost

So each read is an UPDATE of the fence that returns the row. Two columns are enough for both modes of a lock. This is
the rule of timestamp ordering, with the fence as timestamp:

| Access                        | Refused if the fence is smaller than | Remembered in  |
|-------------------------------|--------------------------------------|----------------|
| read or write, exclusive lock | `fence` or `shared_fence`            | `fence`        |
| read, shared lock             | `fence`                              | `shared_fence` |

Shared locks need their own column because several holders have the lock at the same time, with different fences: one
must not refuse the other, but both must refuse an earlier exclusive holder.

How one statement is enough. PostgreSQL, and SQLite since 3.35, have `UPDATE … RETURNING`. MariaDB and MySQL do not:
there a read is an UPDATE that stores the fence, followed by a SELECT that returns the row with its fences. The order
matters, not the transaction: after the UPDATE no older holder can write, and if a newer holder came between the two
statements, the SELECT returns the fence of that holder and the read is refused. The SELECT is a locking one (FOR UPDATE),
because under REPEATABLE READ a plain SELECT would return the snapshot of the transaction, which may be older than the
UPDATE.
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
    """Whether one of the columns has a greater fence; false, not NULL, where they have none."""
    return or_(*(and_(column.is_not(None), column > fence) for column in columns))


class FencedTable:
    """Reads and writes rows of a table under the fence of a lock, and refuses holders of older locks.

    The table has a primary key, a column `fence` and, if rows are also read under shared locks, a column
    `shared_fence`. Both are nullable `BigInteger` columns; NULL means that the row was never used with a fence.

    Each method takes a `sqlalchemy.Connection`. With an `AsyncConnection` write

        row = await connection.run_sync(accounts.read, 2, fence=lock.fence)

    `key` is the value of the primary key, or a tuple where it has several columns. `fence` is `lock.fence` of the lock
    that protects the row. No method commits or rolls back. Errors of all methods:

    - `StaleFence` if the row was used with a greater fence.
    - `LookupError` if there is no such row.
    - `ValueError` or `TypeError` for arguments that cannot be right, before anything is executed.
    - Errors of the database as SQLAlchemy raises them. A transaction that fails because another one was faster
      (serialization failure, deadlock, `database is locked`) has written nothing. Run it again.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._key = tuple(table.primary_key)
        if not self._key:
            raise ValueError(f"table {table.fullname} has no primary key: fences are kept for single rows")
        if "fence" not in table.c:
            raise ValueError(f"table {table.fullname} has no column 'fence': add Column('fence', BigInteger)")
        self._fence: Column[int] = table.c.fence
        self._shared_fence: Column[int] | None = table.c.get("shared_fence")
        for column in self._fences():
            if not isinstance(column.type, BigInteger):
                raise TypeError(f"column {column} must be a BigInteger, not {column.type!r}: fences have up to 53 bits")

    def read(self, connection: Connection, key: Any, *, fence: int, shared: bool = False) -> Row[Any]:
        """Return a row after storing the fence in it; `shared` says that the lock is a shared one.

        From then on the row refuses writes of older holders. That holds once the transaction is committed, and within
        the transaction because the row is locked until its end. After a rollback read again.

        The row has all columns of the table.
        """
        self._check(connection, fence)
        matches = self._matches(key)
        update = self._table.update().where(matches).values(self._remember(fence, shared))
        return self._checked(self._run_and_return(connection, update, matches), key, fence, shared)

    def read_or_create(
        self, connection: Connection, key: Any, values: Mapping[str, Any], *, fence: int, shared: bool = False
    ) -> Row[Any]:
        """Return a row as `read` does; insert it with `values` where it does not exist.

        A row that does not exist cannot remember a fence, so an older holder could still insert it later. Of an
        existing row `values` change nothing. Where they violate another unique constraint, the error is SQLAlchemy's
        `IntegrityError`; on MariaDB and MySQL it is `ValueError`.
        """
        self._check(connection, fence)
        matches = self._matches(key)
        marked = self._fence if not shared else self._shared_column()
        new = {**self._checked_values(values), **self._key_values(key), marked.key: fence}
        dialect = connection.dialect
        if dialect.name in ("mariadb", "mysql"):
            # Where the row exists this assigns a column to itself, which changes nothing.
            same = {self._key[0].key: self._key[0]}
            connection.execute(mysql.insert(self._table).values(new).on_duplicate_key_update(same))
            try:
                return self.read(connection, key, fence=fence, shared=shared)
            except LookupError:
                raise ValueError(
                    f"{self._table.fullname} {key!r} was not inserted: another row has the value of a unique column"
                ) from None
        insert = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
        upsert = (
            insert(self._table)
            .values(new)
            .on_conflict_do_update(index_elements=self._key, set_=self._remember(fence, shared))
        )
        return self._checked(self._run_and_return(connection, upsert, matches), key, fence, shared)

    def write(self, connection: Connection, key: Any, values: Mapping[str, Any], *, fence: int) -> None:
        """Set columns of a row and store the fence in it, in one UPDATE that also checks the fence.

        `values` maps names of columns to values or SQL expressions. The lock is an exclusive one.
        """
        self._check(connection, fence)
        matches = self._matches(key)
        update = (
            self._table.update()
            .where(matches, not_(_any_above(fence, self._fences())))
            .values({**self._checked_values(values), self._fence.key: fence})
        )
        if connection.execute(update).rowcount == 0:
            # Refused, so nothing was written. Which error it is takes another statement.
            self._checked(self._select(connection, matches), key, fence, shared=False)
            raise LookupError(self._missing(key))  # inserted between the two statements

    # -- statements ----------------------------------------------------------------------------------------------

    def _run_and_return(
        self, connection: Connection, statement: Update | Insert, matches: ColumnElement[bool]
    ) -> Row[Any] | None:
        """Execute a statement that stores the fence, and return the row as it is afterwards."""
        if connection.dialect.update_returning:
            return connection.execute(statement.returning(*self._table.c)).first()
        connection.execute(statement)
        return self._select(connection, matches)

    def _select(self, connection: Connection, matches: ColumnElement[bool]) -> Row[Any] | None:
        """The row as it is committed or as this transaction has changed it, never that of an older snapshot."""
        return connection.execute(select(*self._table.c).where(matches).with_for_update()).first()

    def _remember(self, fence: int, shared: bool) -> dict[str, ColumnElement[int]]:
        """SET clause that stores the fence, unless the row has seen a greater one: nothing ever lowers a fence."""
        column = self._shared_column() if shared else self._fence
        return {column.key: case((_any_above(fence, self._fences()), column), else_=literal(fence, BigInteger()))}

    def _matches(self, key: Any) -> ColumnElement[bool]:
        return and_(*(column == self._key_values(key)[column.key] for column in self._key))

    # -- columns -------------------------------------------------------------------------------------------------

    def _fences(self) -> list[Column[int]]:
        return [column for column in (self._fence, self._shared_fence) if column is not None]

    def _conflicting(self, shared: bool) -> list[Column[int]]:
        """The columns with the fences that refuse a smaller one: shared holders do not refuse each other."""
        return [self._fence] if shared else self._fences()

    def _shared_column(self) -> Column[int]:
        if self._shared_fence is None:
            raise ValueError(
                f"table {self._table.fullname} has no column 'shared_fence', which reads under a shared lock need: "
                "add Column('shared_fence', BigInteger)"
            )
        return self._shared_fence

    # -- checks --------------------------------------------------------------------------------------------------

    def _check(self, connection: Connection, fence: int) -> None:
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
        values = key if isinstance(key, tuple) else (key,)
        names = [column.key for column in self._key]
        if len(values) != len(names):
            raise ValueError(f"the key of {self._table.fullname} is ({', '.join(names)}), not {key!r}")
        return dict(zip(names, values, strict=True))

    def _checked_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        reserved = {column.key for column in (*self._key, *self._fences())}
        for name in values:
            if name not in self._table.c:
                raise ValueError(f"table {self._table.fullname} has no column {name!r}")
            if name in reserved:
                raise ValueError(f"values must not contain {name!r}: it comes from `key` or `fence`")
        return dict(values)

    def _checked(self, row: Row[Any] | None, key: Any, fence: int, shared: bool) -> Row[Any]:
        """The row, unless it does not exist or has seen a fence that refuses this one."""
        if row is None:
            raise LookupError(self._missing(key))
        seen = max(row._mapping[column] or 0 for column in self._conflicting(shared))  # noqa: SLF001 - public there
        if seen > fence:
            raise StaleFence(
                f"{self._table.fullname} {key!r} was used with fence {seen}, which is greater than {fence}: "
                "another holder has locked it since",
                fence=fence,
                seen=seen,
            )
        return row

    def _missing(self, key: Any) -> str:
        return f"{self._table.fullname} has no row {key!r}; to insert one under a fence use read_or_create"
