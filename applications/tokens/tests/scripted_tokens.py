"""A token store for tests of selectors, with hooks by which a test delays calls or lets them fail."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from genie.testing.simulation.loop import SimLoop
from genie_tokens.errors import SpentAlready
from genie_tokens.store import Added, Change, Resync, Spent
from genie_tokens.token import Token


def virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop with a virtual clock; it fails if it waits for an event that can't occur."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        loop = SimLoop()
        try:
            loop.run_until_complete(test(*args, **named))
        finally:
            loop.finish()

    return run


async def settle() -> None:
    """Wait until all published changes are processed: no virtual time passes while a task is ready."""
    await asyncio.sleep(0.000_001)


def make_tokens(amounts: Iterable[int], prefix: str = "t", **fields: Any) -> list[Token]:
    """Return tokens of these amounts; by default they are GBP of the owner alice."""
    fields = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"} | fields
    return [Token(id=f"{prefix}{number}", amount=amount, **fields) for number, amount in enumerate(amounts)]


class ScriptedStore:
    """A token store in memory. The hook `before[CALL]` is awaited with the result of a call before it is returned: a "page",
    the result of "get", the end of a "spend" or the start of "changes". What the hook raises, the call raises. `calls`
    counts the calls.
    """

    def __init__(self, tokens: Iterable[Token] = (), *, page: int = 100) -> None:
        self.tokens = {token.id: token for token in tokens}
        self.spenders: dict[str, str] = {}
        self.page = page
        self.before: dict[str, Callable[[Any], Awaitable[None]]] = {}
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.feeds: list[asyncio.Queue[Change | Exception]] = []

    def publish(self, change: Change | Exception) -> None:
        """Send a change to all change feeds; an exception ends them."""
        for listener in self.feeds:
            listener.put_nowait(change)

    async def _hook(self, call: str, result: Any) -> None:
        self.calls[call] += 1
        if call in self.before:
            await self.before[call](result)

    async def add(self, tokens: Sequence[Token]) -> None:
        if any(token.id in self.tokens or token.id in self.spenders for token in tokens):
            raise ValueError("an id exists already")
        for token in tokens:
            self.tokens[token.id] = token
            self.publish(Added(token))

    async def unspent(self, **wallet: str | None) -> AsyncIterator[list[Token]]:
        assert not wallet
        ids = list(self.tokens)
        for start in range(0, len(ids), self.page):
            page = [self.tokens[id] for id in ids[start : start + self.page] if id in self.tokens]
            await self._hook("page", page)
            yield page

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        found = {id: self.tokens[id] for id in ids if id in self.tokens}
        await self._hook("get", found)
        return found

    async def changes(self) -> AsyncIterator[Change]:
        await self._hook("changes", None)
        listener: asyncio.Queue[Change | Exception] = asyncio.Queue()
        listener.put_nowait(Resync())
        self.feeds.append(listener)
        try:
            while True:
                change = await listener.get()
                if isinstance(change, Exception):
                    raise change
                yield change
        finally:
            self.feeds.remove(listener)

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        others = [token.id for token in tokens if self.spenders.get(token.id, transaction) != transaction]
        unknown = [token.id for token in tokens if token.id not in self.tokens and token.id not in self.spenders]
        if others or unknown:
            raise SpentAlready([*others, *unknown])
        if not all(token.id in self.spenders for token in tokens):
            for token in tokens:
                self.spenders[token.id] = transaction
                del self.tokens[token.id]
                self.publish(Spent(token.id))
            await self.add(outputs)
        await self._hook("spend", tokens)
