"""A token store in an SQL database that many processes share: SQLite or PostgreSQL (extra `sql`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import insert, make_url, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from genie_tokens.issue_observers import IssueObservers
from genie_tokens.store import check_issued, id_list, is_first_spend, tokens_by_id
from genie_tokens.stores import schema
from genie_tokens.stores.change_feed import ChangeFeed, ChangeFeeds, encode_changes
from genie_tokens.stores.postgres import Postgres
from genie_tokens.stores.schema import TOKENS, UNSPENT
from genie_tokens.stores.sqlite import Sqlite
from genie_tokens.token import Token

_BACKENDS = {"sqlite+aiosqlite": (Sqlite, "sqlite"), "postgresql+asyncpg": (Postgres, "postgres")}
"""The backend of each dialect and driver, and the extra that installs the driver."""

CALL_TIMEOUT_S = 60.0
"""How long a call may take. Without a limit, a call on a half-open connection would never end, and `close` neither."""

_T = TypeVar("_T")


class SqlTokenStore:
    """A `TokenStore` in the database of an SQLAlchemy URL.

    The URL is `sqlite+aiosqlite:///tokens.db` (a file) or
    `postgresql+asyncpg://user@host/database`. The first use, or entering it as an async context
    manager, creates the tables, or checks the existing ones (WrongSchema). `close` it at the end.
    Database errors are those of SQLAlchemy; TimeoutError after a minute. A call whose caller is cancelled is completed in the
    background, so that the connection stays usable.
    """

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        if parsed.drivername not in _BACKENDS:
            raise ValueError(f"the URL must begin with {' or '.join(_BACKENDS)}, not with {parsed.drivername}")
        backend, extra = _BACKENDS[parsed.drivername]
        try:
            self._backend = backend(parsed)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{parsed.drivername} needs the package {error.name}: pip install 'genie-tokens[{extra}]'",
                name=error.name,
            ) from None
        self._feeds = ChangeFeeds()
        """The change feeds of this process's readers."""
        self.issue_observers = IssueObservers()
        """Selectors of this process, which see added tokens at once."""
        self._listener = self._backend.listener(self._feeds, self.get)
        """Publishes the changes of all processes to the feeds."""
        self._open_mutex = asyncio.Lock()
        """Serializes `_open`."""
        self._opened = False
        """True if the tables were created or checked."""
        self._closed = False
        self._tasks_in_progress: set[asyncio.Task[Any]] = set()
        """The calls that `close` waits for."""

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
        while self._tasks_in_progress:
            await asyncio.wait(self._tasks_in_progress)
        await self._backend.close()

    async def add(self, tokens: Sequence[Token]) -> None:
        """Issue tokens, all or none. Raises ValueError if any of their ids exists already."""
        new = tokens_by_id(tokens)
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
        """Iterate over the unspent tokens, in pages, filtered by the arguments that are not None.

        Each page is read by a separate query: no connection is occupied while the caller processes
        a page.
        """
        arguments = {"owner": owner, "account": account, "token_type": token_type, "identifier": identifier}
        filters = {name: value for name, value in arguments.items() if value is not None}
        last_token: Token | None = None
        while True:
            page = await self._run_to_completion(self._page(filters, last_token))
            if page:
                yield page
            if len(page) < schema.PAGE:  # the last page
                return
            last_token = page[-1]

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Return the unspent tokens with these ids, by id."""
        return await self._run_to_completion(self._get(ids))

    def changes(self) -> ChangeFeed:
        """Iterate over the changes that any process makes, in commit order; begins with `Resync`."""
        return self._feeds.open(self._start_listener)

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        """Spend tokens and issue outputs, all or nothing. Has no effect if the same spend has
        succeeded before.

        Raises SpentAlready if another transaction has spent any of the tokens. Raises ValueError if
        `tokens` is empty or has duplicates, or if the outputs can't be issued.
        """
        spent, new = tokens_by_id(tokens), tokens_by_id(outputs)
        if not spent:
            raise ValueError("tokens must contain at least one token to spend")
        await self._run_to_completion(self._spend(sorted(spent), new, transaction))

    # -- transactions ---------------------------------------------------------------------------------------

    async def _run_to_completion(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in a task that continues if the caller is cancelled; `close` waits for
        the task.

        An interrupted coroutine would leave a connection that must be discarded, and perhaps a
        commit whose outcome is unknown.
        """
        task = asyncio.create_task(_limit(work))
        self._tasks_in_progress.add(task)
        task.add_done_callback(self._on_task_done)
        await asyncio.wait({task})
        return task.result()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks_in_progress.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: the caller may have been cancelled

    async def _open(self) -> None:
        """Prepare the database before its first use. Raises RuntimeError if the store is closed."""
        async with self._open_mutex:
            if self._closed:
                raise RuntimeError("the token store is closed")
            if not self._opened:
                await self._backend.prepare()
                self._opened = True

    async def _start_listener(self) -> None:
        await self._run_to_completion(self._open())
        await self._listener.wait_started()

    async def _page(self, filters: dict[str, str], after: Token | None) -> list[Token]:
        """Read the page of unspent tokens that follows the token `after`; the first page if `after`
        is None.
        """
        await self._open()
        return [schema.token_of(row) for row in await self._backend.rows(schema.unspent_page(filters, after))]

    async def _get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Read the unspent tokens with these ids, by id."""
        await self._open()
        if not ids:
            return {}
        query = select(*schema.COLUMNS).where(self._backend.id_in(ids), UNSPENT)
        tokens = map(schema.token_of, await self._backend.rows(query))
        return {token.id: token for token in tokens}

    async def _add(self, new: dict[str, Token]) -> None:
        """Insert tokens and publish them, in one transaction. Raises ValueError if any of their ids
        exists already.
        """
        await self._open()
        try:
            with self.issue_observers.issuing(new.values()):
                async with self._backend.writing() as connection:
                    await self._insert(connection, new)
                    await self._backend.publish(connection, encode_changes(added=new))
        except IntegrityError as error:
            await self._raise_conflict(new, error)

    async def _spend(self, ids: list[str], new: dict[str, Token], transaction_id: str) -> None:
        """Spend the tokens with these ids for the transaction `transaction_id`, insert the `new`
        tokens (by id), and publish all changes. All of this is one database transaction.

        Has no effect if the call retries a spend that has succeeded. Raises SpentAlready if another
        transaction has spent any of the tokens, and ValueError if a new token exists already.
        """
        await self._open()
        has_id = self._backend.id_in(ids)
        try:
            async with self._backend.writing() as connection:
                # The rows are locked in the order of their ids, so that two spends with common tokens can't deadlock.
                query = select(TOKENS.c.id, TOKENS.c.spent_by).where(has_id).order_by(TOKENS.c.id)
                rows = await connection.execute(query.with_for_update(key_share=True))
                if not is_first_spend(ids, {row.id: row.spent_by for row in rows}, transaction_id):
                    # A retry of a spend that has succeeded.
                    check_issued(new, await self._existing_ids(connection, new), transaction_id)
                    return
                result = await connection.execute(update(TOKENS).where(has_id, UNSPENT).values(spent_by=transaction_id))
                if result.rowcount != len(ids):
                    raise RuntimeError(f"only {result.rowcount} of {len(ids)} locked tokens were updated")
                await self._insert(connection, new)
                await self._backend.publish(connection, encode_changes(spent=ids, added=new))
        except IntegrityError as error:
            await self._raise_conflict(new, error)

    async def _insert(self, connection: AsyncConnection, new: dict[str, Token]) -> None:
        if new:
            await connection.execute(insert(TOKENS), [schema.row(new[id]) for id in sorted(new)])

    async def _existing_ids(self, connection: AsyncConnection, tokens: dict[str, Token]) -> set[str]:
        """Return the ids of the tokens that exist in the database, spent or unspent."""
        if not tokens:
            return set()
        rows = await connection.execute(select(TOKENS.c.id).where(self._backend.id_in(list(tokens))))
        return set(rows.scalars())

    async def _raise_conflict(self, new: dict[str, Token], error: IntegrityError) -> None:
        """Find the cause of `error`, which was raised when `new` tokens were inserted. Raises
        ValueError with the ids of the tokens that exist already, or `error` if none of them exists.
        """
        async with self._backend.writing() as connection:
            existing = await self._existing_ids(connection, new)
        if not existing:
            raise error
        raise ValueError(f"tokens exist already: {id_list(sorted(existing))}") from error


async def _limit(work: Coroutine[Any, Any, _T]) -> _T:
    """Await a coroutine, and return its result. Raises TimeoutError after `CALL_TIMEOUT_S`."""
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await work
