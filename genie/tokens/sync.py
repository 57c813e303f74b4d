"""Token selection for threads: `genie.tokens.sync.InMemorySelector` is `genie.tokens.InMemorySelector` without `await`.

Any number of threads may use one selector and its selections. A call that is decided in memory is executed by the calling
thread; one that needs the store waits for an event loop that runs in a thread of its own, `genie-tokens`. Calls of the
main thread are always executed there, so that Ctrl-C can't leave a selection half made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from genie.tokens.in_memory import selection, selector
from genie.tokens.in_memory import selector as consolidation
from genie.tokens.in_memory.background import Background, Closed, immediately
from genie.tokens.in_memory.selector import Where
from genie.tokens.store import TokenStore
from genie.tokens.token import Token

__all__ = ["Consolidation", "InMemorySelection", "InMemorySelector"]

T = TypeVar("T")


class InMemorySelector:
    """`genie.tokens.InMemorySelector` for any number of threads. A context manager, to be entered once.

    The store is opened (by `async with`, if it can be) and closed by the selector, in the selector's own event loop. Give
    it a store that no other event loop uses meanwhile; `run` does whatever else is to be done with it.

    One call at a time is executed, and the others wait for it. So a `where` must only look at the token: RuntimeError
    where it calls the selector or a selection.
    """

    def __init__(self, store: TokenStore, *, auto_unlock: float = 300.0, max_tokens: int | None = None) -> None:
        self._background = Background("genie-tokens")
        self._store = store
        self._selector = selector.InMemorySelector.guarded_by(
            self._background.mutex, store, auto_unlock=auto_unlock, max_tokens=max_tokens
        )
        self._spends = _Spends()
        self._started = False
        self._resources = AsyncExitStack()
        """What is to be closed."""
        self._closing = asyncio.Lock()

    @property
    def store_error(self) -> Exception | None:
        """What the store failed with, until it could be read again: tokens are selected from an old copy meanwhile."""
        return self._selector.store_error

    def start(self) -> None:
        """Open and load the store, and follow it from then on.

        Raises what the store raises until it is loaded. After that, and after KeyboardInterrupt, the selector is closed.
        """
        if self._started:
            raise RuntimeError("a selector for threads is started once: make another one")
        self._started = True
        try:
            self._background.run(self._open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for the spends under way, close the store, and end the event loop. A second time does nothing.

        Other calls that wait for the store raise RuntimeError, and so does every later one, except `release`.
        """
        try:
            self._background.run(self._shut())
        except Closed:
            pass
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
        """Execute a coroutine in the selector's event loop, and return its result: `selector.run(store.add(tokens))`.

        KeyboardInterrupt cancels it. RuntimeError where the selector is closed, or is closed meanwhile.
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
        """Hold free tokens for a transaction that reach `amount` together; all or none.

        Arguments and errors are those of `genie.tokens.InMemorySelector.select`. Waits for the store only where
        `max_tokens` has kept tokens out of memory. Interrupted by KeyboardInterrupt it holds nothing.
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
            _release,
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
        """Hold the `at_most` smallest free tokens, to be spent into `into` outputs; None where nothing is to be joined.

        Arguments and errors are those of `genie.tokens.InMemorySelector.consolidate`.
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
            _release,
        )
        return None if inner is None else Consolidation(inner, self._background, self._spends)

    def restore(self, data: Mapping[str, Any], *, auto_unlock: float | None = None) -> InMemorySelection:
        """Hold again what a selection's `checkpoint` returned. To be called before `start`, as with
        `genie.tokens.InMemorySelector.restore`; a consolidation is returned as one.
        """
        inner = self._background.call(lambda: self._selector.restore(data, auto_unlock=auto_unlock), _release)
        kind = Consolidation if isinstance(inner, consolidation.Consolidation) else InMemorySelection
        return kind(inner, self._background, self._spends)

    # -- in the event loop ----------------------------------------------------------------------------------

    async def _open(self) -> None:
        async with AsyncExitStack() as stack:
            if isinstance(self._store, AbstractAsyncContextManager):
                await stack.enter_async_context(self._store)
            await stack.enter_async_context(self._selector)
            self._resources = stack.pop_all()

    async def _shut(self) -> None:
        async with self._closing:
            await self._spends.close()
            await self._resources.aclose()


class InMemorySelection:
    """Tokens that are held in memory until they are spent or released, or their time is over.

    A context manager: what was not spent when its block is left is released. Any thread may use it. Made by a selector;
    where that is closed, all but `release` and the plain attributes raise RuntimeError.
    """

    __slots__ = ("_background", "_inner", "_spends")

    def __init__(self, inner: selection.InMemorySelection, background: Background, spends: _Spends) -> None:
        self._inner = inner
        self._background = background
        self._spends = spends

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens."""
        return self._inner.tokens

    @property
    def asked(self) -> int:
        """The amount that was asked for."""
        return self._inner.asked

    @property
    def transaction(self) -> str:
        """The transaction that will spend the tokens."""
        return self._inner.transaction

    @property
    def amount(self) -> int:
        """What the tokens are worth together; at least what was asked for."""
        return self._inner.amount

    @property
    def change(self) -> int:
        """What they are worth beyond what was asked for."""
        return self._inner.change

    @property
    def held(self) -> bool:
        """Whether all of the tokens are still this selection's, and none is known to be spent."""
        return self._background.call(lambda: _evaluate(lambda: self._inner.held))

    @property
    def lost(self) -> tuple[str, ...]:
        """Ids of the tokens that are known to be spent while this selection holds them."""
        return self._background.call(lambda: _evaluate(lambda: self._inner.lost))

    def checkpoint(self) -> dict[str, Any]:
        """Plain data (what JSON can say) by which `restore` holds these tokens again.

        SelectionEnded, where they are not held any more.
        """
        return self._background.call(lambda: _evaluate(self._inner.checkpoint))

    def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing. Waits for the store.

        SelectionEnded, SpentAlready and ValueError as with `genie.tokens.Selection.spend`. After any other error, and
        after KeyboardInterrupt, the outcome is not known: the tokens stay held, and the same spend can be repeated.
        """
        self._background.run(self._spends.spend(self._inner, outputs))

    def release(self) -> None:
        """Give the tokens back. A second time does nothing, and neither does it for what was spent or is lost, or after
        the selector was closed.
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
    """Small change that is held to be joined. Spend it into outputs of `amounts`, the largest first."""

    __slots__ = ()

    @property
    def amounts(self) -> tuple[int, ...]:
        """The amounts of the outputs; together they are worth what the tokens are."""
        inner = self._inner
        assert isinstance(inner, consolidation.Consolidation)  # noqa: S101 - only such are made into one
        return inner.amounts


class _Spends:
    """The spends under way. Closing waits for them, so that the outcome of each is known."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def spend(self, inner: selection.InMemorySelection, outputs: Sequence[Token]) -> None:
        """Spend a selection's tokens."""
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
        """Begin no more, and wait for those that have begun."""
        self._closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)


def _release(inner: selection.InMemorySelection | None) -> None:
    """Undo a selection whose caller was interrupted. In the event loop."""
    if inner is not None:
        immediately(inner.release())


async def _evaluate(read: Callable[[], T]) -> T:
    return read()
