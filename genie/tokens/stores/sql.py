"""A token store in an SQL database that many processes share: SQLite or PostgreSQL (extra `sql`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import insert, make_url, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.tokens.store import check_issued, distinct, id_list, validate_spend
from genie.tokens.stores import schema
from genie.tokens.stores.change_feed import ChangeFeed, ChangeFeeds, payloads
from genie.tokens.stores.postgres import Postgres
from genie.tokens.stores.schema import TOKENS, UNSPENT
from genie.tokens.stores.sqlite import Sqlite
from genie.tokens.token import Token

_BACKENDS = {"sqlite+aiosqlite": Sqlite, "postgresql+asyncpg": Postgres}

_T = TypeVar("_T")


class SqlTokenStore:
    """A `TokenStore` in the database of an SQLAlchemy URL.

    The URL is `sqlite+aiosqlite:///tokens.db` (a file) or
    `postgresql+asyncpg://user@host/database`. The first use, or entering it as an async context
    manager, creates the tables, or checks those that exist (WrongSchema). `close` it at the end.
    Database errors are those of SQLAlchemy. A cancelled call is completed in the background: no
    `spend` is left half done.
    """

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        backend = _BACKENDS.get(parsed.drivername)
        if backend is None:
            raise ValueError(f"the database must be one of {' or '.join(_BACKENDS)}, not {parsed.drivername}")
        self._backend = backend(parsed)
        self._feeds = ChangeFeeds()
        self._listener = self._backend.listener(self._feeds, self._get)
        self._opening = asyncio.Lock()
        self._opened = False
        self._closed = False
        self._in_progress: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        try:
            await self._run_to_completion(self._open())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all feeds, wait for calls in progress, and close the connections."""
        self._closed = True
        self._feeds.end()
        await self._listener.stop()
        while self._in_progress:
            await asyncio.wait(self._in_progress)
        await self._backend.close()

    async def add(self, tokens: Sequence[Token]) -> None:
        """Issue tokens, all or none. ValueError if an id exists."""
        new = distinct(tokens)
        if new:
            await self._run_to_completion(self._add(new))

    async def unspent(
        self,
        *,
        owner: str | None = None,
        account: str | None = None,
        token_type: str | None = None,
        identifier: str | None = None,
    ) -> AsyncIterator[list[Token]]:
        """Iterate over the unspent tokens, in pages. Arguments that are None don't restrict it.

        Each page is a query of its own: no connection is held while the caller processes it.
        """
        filters = {"owner": owner, "account": account, "token_type": token_type, "identifier": identifier}
        wanted = {name: value for name, value in filters.items() if value is not None}
        last: Token | None = None
        while True:
            page = await self._run_to_completion(self._page(wanted, last))
            if page:
                yield page
            if len(page) < schema.PAGE:
                return
            last = page[-1]

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Return those of the tokens that are unspent, by id."""
        return await self._run_to_completion(self._get(ids))

    def changes(self) -> ChangeFeed:
        """Iterate over what any process adds and spends, in commit order; begins with `Resync`."""
        return self._feeds.open(self._start_listener)

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        """Spend tokens and issue outputs, all or nothing. SpentAlready if another transaction was
        first.
        """
        ids, new = distinct(tokens), distinct(outputs)
        if not ids:
            raise ValueError("no token to spend was named")
        await self._run_to_completion(self._spend(sorted(ids), new, transaction))

    # -- transactions ---------------------------------------------------------------------------------------

    async def _run_to_completion(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run work that continues in the background if the caller is cancelled; `close` waits for
        it.

        An interrupted connection would have to be discarded, and an interrupted commit may happen
        or not.
        """
        task = asyncio.create_task(work)
        self._in_progress.add(task)
        task.add_done_callback(self._on_done)
        await asyncio.wait({task})
        return task.result()

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._in_progress.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have been cancelled

    async def _open(self) -> None:
        async with self._opening:
            if self._closed:
                raise RuntimeError("the token store is closed")
            if not self._opened:
                await self._backend.prepare()
                self._opened = True

    async def _start_listener(self) -> None:
        await self._run_to_completion(self._open())
        await self._listener.wait_started()

    async def _page(self, wanted: dict[str, str], after: Token | None) -> list[Token]:
        await self._open()
        return [schema.token(row) for row in await self._backend.rows(schema.unspent_page(wanted, after))]

    async def _get(self, ids: Sequence[str]) -> dict[str, Token]:
        await self._open()
        if not ids:
            return {}
        query = select(*schema.COLUMNS).where(self._backend.id_in(ids), UNSPENT)
        return {row[0]: schema.token(row) for row in await self._backend.rows(query)}

    async def _add(self, new: dict[str, Token]) -> None:
        await self._open()
        try:
            async with self._backend.writing() as connection:
                await self._insert(connection, new)
                await self._backend.publish(connection, payloads(added=new))
        except IntegrityError as error:
            await self._raise_rejected(new, error)

    async def _spend(self, ids: list[str], new: dict[str, Token], transaction: str) -> None:
        await self._open()
        these = self._backend.id_in(ids)
        try:
            async with self._backend.writing() as connection:
                # Locked in the order of their ids, so that two transactions with common tokens can't deadlock.
                query = select(TOKENS.c.id, TOKENS.c.spent_by).where(these).order_by(TOKENS.c.id)
                rows = await connection.execute(query.with_for_update(key_share=True))
                if not validate_spend(ids, {row.id: row.spent_by for row in rows}, transaction):
                    check_issued(new, await self._issued(connection, new), transaction)
                    return
                spent = await connection.execute(update(TOKENS).where(these, UNSPENT).values(spent_by=transaction))
                if spent.rowcount != len(ids):
                    raise RuntimeError(f"{spent.rowcount} of {len(ids)} locked tokens could be spent")
                await self._insert(connection, new)
                await self._backend.publish(connection, payloads(spent=ids, added=new))
        except IntegrityError as error:
            await self._raise_rejected(new, error)

    async def _insert(self, connection: AsyncConnection, new: dict[str, Token]) -> None:
        if new:
            await connection.execute(insert(TOKENS), [schema.row(new[id]) for id in sorted(new)])

    async def _issued(self, connection: AsyncConnection, ids: dict[str, Token]) -> set[str]:
        """Return those of the ids that tokens have, spent or not."""
        if not ids:
            return set()
        found = await connection.execute(select(TOKENS.c.id).where(self._backend.id_in(list(ids))))
        return set(found.scalars())

    async def _raise_rejected(self, new: dict[str, Token], error: IntegrityError) -> None:
        """Raise the ValueError for outputs that the database has rejected."""
        async with self._backend.writing() as connection:
            existing = await self._issued(connection, new)
        if not existing:
            raise error
        raise ValueError(f"tokens exist already: {id_list(sorted(existing))}") from error
