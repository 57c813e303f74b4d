"""Tokens in a database that many processes share: SQLite or PostgreSQL, by the extra `genie-lock[sql]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import insert, make_url, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.tokens.stores import schema
from genie.tokens.stores.change_feed import Feed, Feeds, texts
from genie.tokens.stores.postgres import Postgres
from genie.tokens.stores.schema import TOKENS, UNSPENT
from genie.tokens.stores.spending import can_spend, check_issued, distinct, some
from genie.tokens.stores.sqlite import Sqlite
from genie.tokens.token import Token

_BACKENDS = {"sqlite+aiosqlite": Sqlite, "postgresql+asyncpg": Postgres}

_T = TypeVar("_T")


class SqlTokenStore:
    """A `TokenStore` in the database that a URL of SQLAlchemy names: `sqlite+aiosqlite:///tokens.db` (a file) or
    `postgresql+asyncpg://user@host/database`.

    It is opened by its first use, or as an async context manager: then the tables are created, or checked if they are
    there (WrongSchema). `close` it at the end. What the database says against anything else comes out as SQLAlchemy's
    errors. What is asked of it is done to its end when who asked is cancelled: `spend` is never left half done.
    """

    def __init__(self, url: str) -> None:
        made = make_url(url)
        backend = _BACKENDS.get(made.drivername)
        if backend is None:
            raise ValueError(f"a database of {' or '.join(_BACKENDS)} is needed, not {made.drivername}")
        self._backend = backend(made)
        self._feeds = Feeds()
        self._follower = self._backend.follower(self._feeds, self._get)
        self._opening = asyncio.Lock()
        self._opened = False
        self._closed = False
        self._under_way: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        try:
            await self._to_its_end(self._open())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all feeds, wait for what is under way, and close the connections."""
        self._closed = True
        self._feeds.end()
        await self._follower.stop()
        while self._under_way:
            await asyncio.wait(self._under_way)
        await self._backend.close()

    async def add(self, tokens: Sequence[Token]) -> None:
        """Issue tokens, all or none; ValueError where an id is not new."""
        new = distinct(tokens)
        if new:
            await self._to_its_end(self._add(new))

    async def unspent(
        self,
        *,
        owner: str | None = None,
        account: str | None = None,
        token_type: str | None = None,
        identifier: str | None = None,
    ) -> AsyncIterator[list[Token]]:
        """The tokens that nobody has spent, page by page. What is left out is not looked at.

        Each page is a query of its own: no connection is held while it is looked at.
        """
        asked = {"owner": owner, "account": account, "token_type": token_type, "identifier": identifier}
        wanted = {name: value for name, value in asked.items() if value is not None}
        last: Token | None = None
        while True:
            page = await self._to_its_end(self._page(wanted, last))
            if page:
                yield page
            if len(page) < schema.PAGE:
                return
            last = page[-1]

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Those of the tokens that nobody has spent, by id."""
        return await self._to_its_end(self._get(ids))

    def changes(self) -> Feed:
        """What is added and spent, as it happens and in order, by whatever process; begins with `Resync`."""
        return self._feeds.open(self._follow)

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        """Spend tokens and issue outputs, all or nothing; SpentAlready, where another transaction was first."""
        ids, new = distinct(tokens), distinct(outputs)
        if not ids:
            raise ValueError("there is no token to spend")
        await self._to_its_end(self._spend(sorted(ids), new, transaction))

    # -- each in one transaction, to its end -----------------------------------------------------------------

    async def _to_its_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do work that goes on if who asked for it is cancelled.

        A connection that is left in the midst of something has to be thrown away; and a commit that is left may happen
        or not.
        """
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait({task})
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # it was seen, even if nobody asks any more

    async def _open(self) -> None:
        async with self._opening:
            if self._closed:
                raise RuntimeError("the token store is closed")
            if not self._opened:
                await self._backend.prepare()
                self._opened = True

    async def _follow(self) -> None:
        await self._to_its_end(self._open())
        await self._follower.started()

    async def _page(self, wanted: dict[str, str], after: Token | None) -> list[Token]:
        await self._open()
        return [schema.token(row) for row in await self._backend.rows(schema.unspent_page(wanted, after))]

    async def _get(self, ids: Sequence[str]) -> dict[str, Token]:
        await self._open()
        if not ids:
            return {}
        query = select(*schema.COLUMNS).where(self._backend.among(ids), UNSPENT)
        return {row[0]: schema.token(row) for row in await self._backend.rows(query)}

    async def _add(self, new: dict[str, Token]) -> None:
        await self._open()
        try:
            async with self._backend.writing() as connection:
                await self._insert(connection, new)
                await self._backend.publish(connection, texts(added=new))
        except IntegrityError as error:
            await self._refuse(new, error)

    async def _spend(self, ids: list[str], new: dict[str, Token], transaction: str) -> None:
        await self._open()
        these = self._backend.among(ids)
        try:
            async with self._backend.writing() as connection:
                # In the order of their ids: of two who want the same rows, one waits for the other.
                query = select(TOKENS.c.id, TOKENS.c.spent_by).where(these).order_by(TOKENS.c.id)
                found = await connection.execute(query.with_for_update(key_share=True))
                if not can_spend(ids, {row.id: row.spent_by for row in found}, transaction):
                    check_issued(new, await self._issued(connection, new), transaction)
                    return
                spent = await connection.execute(update(TOKENS).where(these, UNSPENT).values(spent_by=transaction))
                if spent.rowcount != len(ids):
                    raise RuntimeError(f"{spent.rowcount} of {len(ids)} locked tokens could be spent")
                await self._insert(connection, new)
                await self._backend.publish(connection, texts(spent=ids, added=new))
        except IntegrityError as error:
            await self._refuse(new, error)

    async def _insert(self, connection: AsyncConnection, new: dict[str, Token]) -> None:
        if new:
            await connection.execute(insert(TOKENS), [schema.row(new[id]) for id in sorted(new)])

    async def _issued(self, connection: AsyncConnection, ids: dict[str, Token]) -> set[str]:
        """Those of the ids that tokens have, spent or not."""
        if not ids:
            return set()
        found = await connection.execute(select(TOKENS.c.id).where(self._backend.among(list(ids))))
        return set(found.scalars())

    async def _refuse(self, new: dict[str, Token], error: IntegrityError) -> None:
        """Say what was wrong with outputs that the database has refused."""
        async with self._backend.writing() as connection:
            there = await self._issued(connection, new)
        if not there:
            raise error
        raise ValueError(f"there already: {some(sorted(there))}") from error
