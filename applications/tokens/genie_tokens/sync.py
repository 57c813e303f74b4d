"""Token selection for threads: `genie_tokens.sync.InMemorySelector` is
`genie_tokens.InMemorySelector` without `await`.

Any number of threads may use one selector and its selections. A call that needs only memory is
executed by the calling thread. A call that needs the store is executed by an event loop in a
background thread, `genie-tokens`. That thread also executes all calls of the main thread, so that
Ctrl-C can't interrupt a selection halfway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from genie_tokens.in_memory import selection, selector
from genie_tokens.in_memory.background import Background, Closed, run_without_waiting
from genie_tokens.in_memory.selector import Where
from genie_tokens.store import TokenStore
from genie_tokens.token import Token

__all__ = ["Consolidation", "InMemorySelection", "InMemorySelector"]

T = TypeVar("T")


class InMemorySelector:
    """`genie_tokens.InMemorySelector` for any number of threads. A context manager that can be
    entered once.

    The selector opens the store (by `async with`, if it is a context manager) and closes it, in its
    own event loop. No other event loop may use the store meanwhile; `run` executes anything else
    that uses it.

    Calls are executed one at a time. So a `where` must not call the selector or a selection:
    RuntimeError if it does.
    """

    def __init__(self, store: TokenStore, *, auto_unlock: float = 300.0, max_tokens: int | None = None) -> None:
        self._background = Background("genie-tokens")
        """The event loop that executes calls that wait for the store."""
        self._store = store
        self._selector = selector.InMemorySelector.guarded_by(
            self._background.mutex, store, auto_unlock=auto_unlock, max_tokens=max_tokens
        )
        self._spends = _Spends()
        """The spends that `close` waits for."""
        self._started = False
        """True if `start` was called: it can be called only once."""
        self._resources = AsyncExitStack()
        """Closes the selector and the store. Empty until both are open."""
        self._closing = asyncio.Lock()
        """Serializes `_close`."""

    @property
    def store_error(self) -> Exception | None:
        """The store's last error, or None once all tokens were loaded after the error. Until then
        selections use an outdated copy.
        """
        return self._selector.store_error

    def start(self) -> None:
        """Open the store, load its tokens, and begin to follow its changes.

        Raises the store's error if this first load fails. After an error or KeyboardInterrupt the
        selector is closed. Raises RuntimeError if `start` was called before.
        """
        if self._started:
            raise RuntimeError("a selector for threads can be started only once: create another one")
        self._started = True
        try:
            self._background.run(self._open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for spends in progress, close the store, and end the event loop. Further calls have
        no effect.

        Other calls that wait for the store raise RuntimeError, and so does every later call except
        `release`.
        """
        try:
            self._background.run(self._close())
        except Closed:
            pass  # `close` was called before
        finally:
            self._background.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Execute a coroutine in the selector's event loop, and return the coroutine's result; for
        example `selector.run(store.add(tokens))`.

        KeyboardInterrupt cancels the coroutine. Raises RuntimeError if the selector is closed
        before the coroutine has ended.
        """
        return self._background.run(coroutine)

    def select(
        self,
        amount: int,
        *,
        token_type: str,
        identifier: str,
        transaction: str,
        owner: str | None = None,
        account: str | None = None,
        where: Where | None = None,
        limit: int | None = None,
        auto_unlock: float | None = None,
    ) -> InMemorySelection:
        """Select and hold free tokens that together reach the amount, all or none.

        Arguments and errors are those of `genie_tokens.InMemorySelector.select`. Waits for the
        store only for tokens that are not in memory because of `max_tokens`. After
        KeyboardInterrupt nothing is held.
        """
        inner = self._background.call(
            lambda: self._selector.select(
                amount,
                token_type=token_type,
                identifier=identifier,
                transaction=transaction,
                owner=owner,
                account=account,
                where=where,
                limit=limit,
                auto_unlock=auto_unlock,
            ),
            undo=_release_unclaimed,
        )
        return InMemorySelection(inner, self._background, self._spends)

    def consolidate(
        self,
        *,
        token_type: str,
        identifier: str,
        transaction: str,
        owner: str | None = None,
        account: str | None = None,
        where: Where | None = None,
        into: int = 1,
        at_most: int = 100,
        auto_unlock: float | None = None,
    ) -> Consolidation | None:
        """Select and hold the smallest free tokens, at most `at_most`, to join them into `into`
        outputs. Returns None if there is nothing to join.

        Arguments and errors are those of `genie_tokens.InMemorySelector.consolidate`.
        """
        inner = self._background.call(
            lambda: self._selector.consolidate(
                token_type=token_type,
                identifier=identifier,
                transaction=transaction,
                owner=owner,
                account=account,
                where=where,
                into=into,
                at_most=at_most,
                auto_unlock=auto_unlock,
            ),
            undo=_release_unclaimed,
        )
        return None if inner is None else Consolidation(inner, self._background, self._spends)

    def restore(self, data: Mapping[str, Any], *, auto_unlock: float | None = None) -> InMemorySelection:
        """Create a selection again from its `checkpoint`, and hold its tokens. Call `restore`
        before `start`.

        See `genie_tokens.InMemorySelector.restore`. The checkpoint of a consolidation is restored
        as a consolidation.
        """
        inner = self._background.call(
            lambda: self._selector.restore(data, auto_unlock=auto_unlock), undo=_release_unclaimed
        )
        selection_type = Consolidation if isinstance(inner, selector.Consolidation) else InMemorySelection
        return selection_type(inner, self._background, self._spends)

    # -- in the event loop ----------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Open the store, if it is a context manager, and then the selector. `_close` closes both. If
        opening the selector fails, the store is closed.
        """
        async with AsyncExitStack() as stack:
            if isinstance(self._store, AbstractAsyncContextManager):
                await stack.enter_async_context(self._store)
            await stack.enter_async_context(self._selector)
            self._resources = stack.pop_all()  # keeps both open after this block

    async def _close(self) -> None:
        """Wait for spends in progress, and close the selector and the store."""
        async with self._closing:
            await self._spends.close()
            await self._resources.aclose()


class InMemorySelection:
    """Tokens that are held in memory until they are spent or released, or their reservation
    expires.

    A context manager that releases the tokens if they were not spent. Any thread may use it. Once
    the selector is closed, `held`, `lost`, `checkpoint` and `spend` raise RuntimeError.
    """

    __slots__ = ("_background", "_inner", "_spends")

    def __init__(self, inner: selection.InMemorySelection, background: Background, spends: _Spends) -> None:
        self._inner = inner
        """The asyncio selection, which only `_background` may call."""
        self._background = background
        self._spends = spends
        """The spends that the selector's `close` waits for."""

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The selected tokens."""
        return self._inner.tokens

    @property
    def target(self) -> int:
        """The requested amount."""
        return self._inner.target

    @property
    def transaction(self) -> str:
        """The transaction that will spend the tokens."""
        return self._inner.transaction

    @property
    def amount(self) -> int:
        """The sum of the tokens; at least `target`."""
        return self._inner.amount

    @property
    def change(self) -> int:
        """The sum of the tokens beyond `target`."""
        return self._inner.change

    @property
    def held(self) -> bool:
        """True if this selection still holds all of the tokens, and none is known to be spent."""
        return self._background.call(lambda: _evaluate(lambda: self._inner.held))

    @property
    def lost(self) -> tuple[str, ...]:
        """Ids of the tokens that are known to be spent although this selection holds them."""
        return self._background.call(lambda: _evaluate(lambda: self._inner.lost))

    def checkpoint(self) -> dict[str, Any]:
        """Return JSON-compatible data from which `restore` creates the selection again.

        Raises SelectionEnded if the tokens are no longer held.
        """
        return self._background.call(lambda: _evaluate(self._inner.checkpoint))

    def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing. Waits for the store.

        Raises SelectionEnded, SpentAlready or ValueError like `genie_tokens.Selection.spend`. After
        any other error, and after KeyboardInterrupt, the outcome is unknown: the tokens stay held,
        and the same spend can be retried.
        """
        self._background.run(self._spends.spend(self._inner, outputs))

    def release(self) -> None:
        """Release the tokens. Has no effect on tokens that were released, spent or lost before, or
        after the selector was closed.
        """
        with suppress(Closed):
            self._background.call(self._inner.release)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Consolidation(InMemorySelection):
    """Small tokens that are held to be joined into fewer, larger ones: spend them with outputs of
    these `amounts`, the largest first.
    """

    __slots__ = ()

    @property
    def amounts(self) -> tuple[int, ...]:
        """The amounts of the outputs. Their sum is the sum of the tokens."""
        inner = self._inner
        assert isinstance(inner, selector.Consolidation)  # noqa: S101 - by its construction
        return inner.amounts


class _Spends:
    """The spends in progress. `close` waits for them, so that the result of each is known."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        """The tasks that execute a spend."""
        self._closed = False

    async def spend(self, inner: selection.InMemorySelection, outputs: Sequence[Token]) -> None:
        """Spend a selection's tokens; `close` waits until the spend has ended. Raises Closed after
        `close`.
        """
        if self._closed:
            raise Closed
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - it runs in the event loop
        self._tasks.add(task)
        try:
            await inner.spend(outputs)
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        """Reject further spends, and wait for those in progress."""
        self._closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)


def _release_unclaimed(inner: selection.InMemorySelection | None) -> None:
    """Release a selection whose caller was interrupted before the call returned the selection. Runs
    in the event loop.
    """
    if inner is not None:
        run_without_waiting(inner.release())


async def _evaluate(read: Callable[[], T]) -> T:
    return read()
