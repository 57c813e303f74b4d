"""Following a token store: loads its tokens, and then applies every change.

The change feed begins with `Resync`: it reports every later change. Only then are the tokens
loaded, page by page, while changes are applied as they arrive. A token that is added during the
load appears as a change, in a page, or in both. A token that is spent during the load may still
appear in a page: so the ids spent during a load are recorded, and pages do not add them again. On
another `Resync` everything is loaded again; the tokens that this load lacks were spent in between.

If the store fails, the load and the feed are retried with exponential backoff.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, TypeVar

from genie.backoff import Backoff
from genie.tasks import cancel_and_wait, closing
from genie_tokens.issue_observers import ObservableStore
from genie_tokens.store import Added, Change, Resync, Spent, TokenStore
from genie_tokens.token import Token

T = TypeVar("T")


class TokenSink(Protocol):
    """A set of unspent tokens that a follower keeps current."""

    def add(self, token: Token) -> None:
        """Add an unspent token, which may be present already."""

    def remove(self, id: str) -> bool:
        """Remove a spent token. Returns whether the token was present."""

    def ids(self) -> Iterable[str]:
        """Return the ids of all tokens."""


class StoreFollower:
    """Keeps the tokens in a sink current with a token store. After an error of the store
    (`store_error`), the sink may be outdated.
    """

    def __init__(self, store: TokenStore, sink: TokenSink) -> None:
        self.store_error: Exception | None = None
        """The last error of the store; None once all tokens were loaded after the error."""
        self._store = store
        self._sink = sink
        self._follow_task: asyncio.Task[None] | None = None
        """The task that applies the changes of the change feed."""
        self._load_task: asyncio.Task[None] | None = None
        """The task that loads all tokens."""
        self._first_load: asyncio.Future[None] | None = None
        """Done when the first load has succeeded or failed; None before `start`."""
        self._backoff = Backoff()
        """The pauses after errors of the store."""
        self._unconfirmed_ids: set[str] = set()
        """Ids of tokens that this process has spent. The change feed has not reported these spends
        yet.
        """
        self._expected_ids: set[str] = set()
        """Ids of the tokens that calls in progress in this process are about to issue (spends, and `add`
        of the store), except tokens that are known to be spent.
        """
        self._ids_spent_during_load: set[str] | None = None
        """Ids of tokens spent since the load began; None while no load is in progress."""
        self._stale_ids: set[str] = set()
        """Ids of tokens that were present before the load began, and were not reported since."""

    async def start(self) -> None:
        """Start to follow the store, and wait until all tokens were loaded for the first time.
        Raises the store's error if this first load fails; `start` can be called again then.
        """
        if self._follow_task is not None:
            raise RuntimeError("the store is being followed already")
        if isinstance(self._store, ObservableStore):
            self._store.issue_observers.add(self)
        self._first_load = asyncio.get_running_loop().create_future()
        self._follow_task = asyncio.create_task(self._follow(self._first_load), name="tokens: follow the store")
        try:
            await self.wait_loaded()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop following the store. If the first load is in progress, the calls that wait for this
        load raise RuntimeError.
        """
        await cancel_and_wait(self._follow_task)
        await cancel_and_wait(self._load_task)
        self._follow_task = None
        if self._first_load is not None and not self._first_load.done():
            self._fail_first_load(RuntimeError("the selector was closed before the store was loaded"))

    @property
    def is_running(self) -> bool:
        """True if the follower was started, and not closed since."""
        return self._follow_task is not None

    @property
    def is_ready(self) -> bool:
        """True if the first load has succeeded, and the follower was not closed since."""
        first_load = self._first_load
        return (
            self._follow_task is not None
            and first_load is not None
            and first_load.done()
            and first_load.exception() is None
        )

    async def wait_loaded(self) -> None:
        """Wait until the first load of the store has ended. Raises the error with which the load
        has failed, or RuntimeError if the follower is not started.
        """
        # A follower that was closed after a successful load is not started.
        if self._first_load is None or (self._follow_task is None and self._first_load.exception() is None):
            raise RuntimeError("the selector is not open: use it as an async context manager, or start() it")
        await asyncio.shield(self._first_load)  # a caller that is cancelled does not cancel the future

    def on_spent(self, id: str) -> None:
        """Remove a token that this process has spent. If the change feed reports the issue of the
        token later, the token is not added again.
        """
        self._expected_ids.discard(id)
        if self._sink.remove(id):
            self._unconfirmed_ids.add(id)
        if self._ids_spent_during_load is not None:
            self._ids_spent_during_load.add(id)

    def expect(self, outputs: Iterable[Token]) -> None:
        """Begin to record which of these outputs are spent: an output stays in `_expected_ids` until it
        is spent, or `stop_expecting` is called.

        Must be called before this process issues the outputs, because the change feed may report
        that an output is spent before the issuing call returns.
        """
        self._expected_ids.update(token.id for token in outputs)

    def on_issued(self, outputs: Iterable[Token]) -> None:
        """Add outputs that were passed to `expect`, and are issued now. Outputs that were spent
        meanwhile are skipped.

        So the outputs can be selected at once, even if the change feed reports them late.
        """
        for token in outputs:
            if token.id in self._expected_ids:
                self._add(token)

    def stop_expecting(self, outputs: Iterable[Token]) -> None:
        """Stop recording which of these outputs are spent, because the spend that issues them has
        succeeded or failed.
        """
        self._expected_ids.difference_update(token.id for token in outputs)

    # -- changes ------------------------------------------------------------------------------------------

    async def _follow(self, first_load: asyncio.Future[None]) -> None:
        """Apply the changes of the store's change feed. After an error, cancel the load in progress,
        pause, and connect to the feed again. Returns if the first load has failed.
        """
        while not (first_load.done() and first_load.exception()):
            try:
                async with closing(self._store.changes()) as changes:
                    async for change in changes:
                        self._apply(change, first_load)
                raise ConnectionError("the change feed of the store has ended")  # noqa: TRY301 - retried like any error
            except Exception as error:  # noqa: BLE001 - a store may raise anything
                await cancel_and_wait(self._load_task)
                await self._back_off(error, first_load)

    def _apply(self, change: Change, first_load: asyncio.Future[None]) -> None:
        """Apply a change of the change feed to the sink. A `Resync` begins to load all tokens, and
        cancels a load in progress.
        """
        if isinstance(change, Added):
            self._add(change.token)
        elif isinstance(change, Spent):
            self._unconfirmed_ids.discard(change.id)
            self._expected_ids.discard(change.id)
            self._stale_ids.discard(change.id)
            if self._ids_spent_during_load is not None:
                self._ids_spent_during_load.add(change.id)
            self._sink.remove(change.id)
        elif isinstance(change, Resync):
            if self._load_task is not None:
                self._load_task.cancel()
            self._ids_spent_during_load = set()
            self._stale_ids = set(self._sink.ids())  # the load removes the ids that it finds from this set
            self._load_task = asyncio.create_task(
                self._load(first_load, self._unconfirmed_ids.copy()), name="tokens: load the store"
            )

    def _add(self, token: Token) -> None:
        """Add a token to the sink. Has no effect if this process has spent the token: then the
        report of its issue is late.
        """
        if token.id not in self._unconfirmed_ids:
            self._stale_ids.discard(token.id)
            self._sink.add(token)

    async def _back_off(self, error: Exception, first_load: asyncio.Future[None]) -> None:
        """Record an error of the store, and pause before the next attempt, with exponential
        backoff. If the first load has not succeeded yet, it fails with this error.
        """
        if not first_load.done():
            self._fail_first_load(error)
        self.store_error = error
        await asyncio.sleep(self._backoff.next_delay())

    def _fail_first_load(self, error: Exception) -> None:
        if self._first_load is not None:
            self._first_load.set_exception(error)
            self._first_load.exception()  # marks the exception as retrieved, in case nothing awaits the future

    # -- loading ----------------------------------------------------------------------------------------------

    async def _load(self, first_load: asyncio.Future[None], unconfirmed_ids: set[str]) -> None:
        """Load all tokens from the store, with retries, and then remove the tokens from the sink
        that are no longer in the store.

        `unconfirmed_ids` are the ids of the tokens that this process had spent before the load began.
        """
        while True:
            try:
                await self._read_pages()
                break
            except Exception as error:  # noqa: BLE001 - a store may raise anything
                await self._back_off(error, first_load)
        for id in self._stale_ids:
            self._sink.remove(id)
        self._stale_ids = set()
        self._ids_spent_during_load = None
        self._unconfirmed_ids -= unconfirmed_ids  # their reports may have been lost while the feed was not connected
        self._backoff.reset()
        self.store_error = None
        if not first_load.done():
            first_load.set_result(None)

    async def _read_pages(self) -> None:
        """Read all unspent tokens from the store, page by page, and add the tokens that were not
        spent since the load began.
        """
        async with closing(self._store.unspent()) as pages:
            async for page in pages:
                for token in page:
                    if self._ids_spent_during_load is None or token.id not in self._ids_spent_during_load:
                        self._add(token)
                await asyncio.sleep(0)  # yield to other tasks even if the store does not
