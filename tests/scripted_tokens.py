"""A token store for tests of selectors: it holds what a test tells it to hold, and fails when it is told to."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from genie.testing.simulation.loop import SimLoop
from genie.tokens.errors import SpentAlready
from genie.tokens.store import Added, Change, Resync, Spent
from genie.tokens.token import Token


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on a loop with a virtual clock; one that waits for what can't come fails."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        loop = SimLoop()
        try:
            loop.run_until_complete(test(*args, **named))
        finally:
            loop.finish()

    return run


async def settle() -> None:
    """Until everything that was told has been taken: no virtual time passes while anything is ready."""
    await asyncio.sleep(0.000_001)


def coins(amounts: Iterable[int], prefix: str = "t", **fields: Any) -> list[Token]:
    """Tokens of these amounts, of alice's pounds unless it is said otherwise."""
    fields = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"} | fields
    return [Token(id=f"{prefix}{number}", amount=amount, **fields) for number, amount in enumerate(amounts)]


class ScriptedStore:
    """`before[CALL]` is awaited (with what is about to be told) before a page, an answer of `get`, or the outcome of a
    `spend` is told; what it raises is raised. `calls` counts.
    """

    def __init__(self, tokens: Iterable[Token] = (), *, page: int = 100) -> None:
        self.tokens = {token.id: token for token in tokens}
        self.spenders: dict[str, str] = {}
        self.page = page
        self.before: dict[str, Callable[[Any], Awaitable[None]]] = {}
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.listeners: list[asyncio.Queue[Change | Exception]] = []

    def tell(self, change: Change | Exception) -> None:
        """To all who listen."""
        for listener in self.listeners:
            listener.put_nowait(change)

    async def _hook(self, call: str, told: Any) -> None:
        self.calls[call] += 1
        if call in self.before:
            await self.before[call](told)

    async def add(self, tokens: Sequence[Token]) -> None:
        if any(token.id in self.tokens or token.id in self.spenders for token in tokens):
            raise ValueError("an id is not new")
        for token in tokens:
            self.tokens[token.id] = token
            self.tell(Added(token))

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
        self.listeners.append(listener)
        try:
            while True:
                change = await listener.get()
                if isinstance(change, Exception):
                    raise change
                yield change
        finally:
            self.listeners.remove(listener)

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        others = [token.id for token in tokens if self.spenders.get(token.id, transaction) != transaction]
        unknown = [token.id for token in tokens if token.id not in self.tokens and token.id not in self.spenders]
        if others or unknown:
            raise SpentAlready([*others, *unknown])
        if not all(token.id in self.spenders for token in tokens):
            for token in tokens:
                self.spenders[token.id] = transaction
                del self.tokens[token.id]
                self.tell(Spent(token.id))
            await self.add(outputs)
        await self._hook("spend", tokens)
