"""A Genie and a store of tokens that do what a test tells them, under a virtual clock: nothing here waits for time."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genie.errors import Insufficient, LockLost, Unavailable
from genie.testing.simulation.loop import SimLoop
from genie.tokens.errors import SpentAlready
from genie.tokens.store import Added, Change, Resync, Spent
from genie.tokens.token import MAX_AMOUNT, Token

GBP = {"token_type": "Fiat", "identifier": "GBP"}
ALICE = {"owner": "alice", **GBP}


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in a loop whose clock is virtual."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            runner.run(test(*args, **options))

    return run


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def listen(*selectors: Any) -> None:
    """Let selectors hear who holds what, as they do once it is of use."""
    for selector in selectors:
        selector._context.subscription._contention = 1.0
        selector._context.subscription.record_request(contended=True)
    await settle()


async def bustle(genie: FakeGenie, seconds: float) -> None:
    """Let so much happen elsewhere that listening is dear."""
    for _ in range(round(seconds * 10)):
        genie.end(genie.take(*(f"elsewhere-{number}" for number in range(50))))
        await asyncio.sleep(0.1)


def token(id: str, amount: int, **more: Any) -> Token:
    return Token(id, more.pop("owner", "alice"), "Fiat", "GBP", amount, **more)


def tokens(count: int, amount: int = 1, name: str = "t", **more: Any) -> list[Token]:
    return [token(f"{name}{number}", amount, **more) for number in range(count)]


@dataclass
class LockChange:
    resource: str
    state: str
    mode: str
    id: int
    transaction: str | None


class FakeLock:
    def __init__(self, genie: FakeGenie, id: int, resources: tuple[str, ...], transaction: str | None) -> None:
        self.genie, self.id, self.resources, self.transaction = genie, id, resources, transaction
        self.lost = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None

    async def release(self) -> None:
        self.genie.end(self)  # it is on its way at once
        await asyncio.sleep(self.genie.delay_s)
        if self.genie.down:
            raise Unavailable("the fake is down")

    async def extend(self, seconds: float) -> None:
        await asyncio.sleep(self.genie.delay_s)
        if self.id not in self.genie.locks:
            raise LockLost("it is lost", id=self.id)
        self.genie.extended.append(self.id)
        self.genie.hold(self, seconds)


class FakeGenie:
    """`asks` are the names of each `acquire_any`, in order. `hushed`: watchers hear nothing, for now. `late`: watchers get
    the events when the test calls `deliver`.
    """

    def __init__(self) -> None:
        self.ids = itertools.count(101)
        self.locks: dict[int, FakeLock] = {}
        self.held: dict[str, dict[int, str | None]] = {}
        self.asks: list[list[str]] = []
        self.extended: list[int] = []
        self.delay_s = 0.0
        self.down = False
        self.hushed = False
        self.late = False
        self.undelivered: list[tuple[asyncio.Queue[LockChange | None], LockChange]] = []
        self.before_watch: Callable[[], None] | None = None
        self.answer: asyncio.Event | None = None
        """If there is one, grants are told when it is set."""
        self._watchers: dict[asyncio.Queue[LockChange | None], str] = {}

    def holders(self, id: str) -> set[str | None]:
        return set(self.held.get(f"token/{id}", {}).values())

    @property
    def listeners(self) -> int:
        return len(self._watchers)

    @property
    def tokens_held(self) -> set[str]:
        return {name.removeprefix("token/") for name in self.held if name.startswith("token/")}

    def take(self, *ids: str, transaction: str | None = "other", lease: float = 1e6) -> FakeLock:
        """Somebody else locks tokens."""
        return self.lock(tuple(f"exclusive:token/{id}" for id in ids), transaction, lease)

    async def acquire_any(
        self,
        resources: Sequence[str],
        target: int,
        *,
        weights: Sequence[int] | None = None,
        transaction: str | None = None,
        transaction_timeout: float = 10.0,
    ) -> FakeLock:
        assert len(set(resources)) == len(resources) <= 10_000
        assert sum(len(name.encode()) for name in resources) < 1 << 20
        for number in (target, *(weights or ())):
            assert type(number) is int
            assert 0 < number <= MAX_AMOUNT
        self.asks.append([name.removeprefix("exclusive:token/") for name in resources])
        await asyncio.sleep(self.delay_s)
        if self.down:
            raise Unavailable("the fake is down")
        taken, reached, locked = [], 0, 0
        for name, weight in zip(resources, weights or [1] * len(resources), strict=True):
            if reached >= target:
                break
            if set(self.held.get(name.partition(":")[2], {}).values()) - {transaction}:
                locked += weight
            else:
                taken.append(name)
                reached += weight
        if reached < target:
            raise Insufficient(id=next(self.ids), free=reached, locked=locked)
        lock = self.lock(tuple(taken), transaction, transaction_timeout)
        try:
            if self.answer is not None:
                await self.answer.wait()
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.end(lock)
            raise
        return lock

    async def acquire(
        self, *resources: str, transaction: str | None = None, transaction_timeout: float = 10.0
    ) -> FakeLock:
        return self.lock(resources, transaction, transaction_timeout)

    async def release(self, id: int) -> str:
        if id in self.locks:
            self.end(self.locks[id])
        return "success"

    async def ping(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.down:
            raise Unavailable("the fake is down")

    async def watch(self, prefix: str) -> AsyncIterator[LockChange]:
        changes: asyncio.Queue[LockChange | None] = asyncio.Queue()
        if self.before_watch is not None:
            self.before_watch()
        for name, locks in self.held.items():
            for id, transaction in locks.items():
                if name.startswith(prefix):
                    changes.put_nowait(LockChange(name, "locked", "exclusive", id, transaction))
        self._watchers[changes] = prefix
        try:
            while (change := await changes.get()) is not None:
                yield change
            raise Unavailable("the fake watches no more")
        finally:
            del self._watchers[changes]

    def cut_watchers(self) -> None:
        for changes in self._watchers:
            changes.put_nowait(None)

    def lock(self, resources: tuple[str, ...], transaction: str | None, lease: float) -> FakeLock:
        lock = FakeLock(self, next(self.ids), resources, transaction)
        self.locks[lock.id] = lock
        for name in resources:
            self.held.setdefault(name.partition(":")[2], {})[lock.id] = transaction
            self._tell(name, "locked", lock)
        self.hold(lock, lease)
        return lock

    def hold(self, lock: FakeLock, seconds: float) -> None:
        if lock.timer is not None:
            lock.timer.cancel()
        lock.timer = asyncio.get_running_loop().call_later(seconds, self.lose, lock)

    def lose(self, lock: FakeLock) -> None:
        self.end(lock)
        lock.lost.set()

    def end(self, lock: FakeLock) -> None:
        if self.locks.pop(lock.id, None) is None:
            return
        if lock.timer is not None:
            lock.timer.cancel()
        for name in lock.resources:
            bare = name.partition(":")[2]
            del self.held[bare][lock.id]
            if not self.held[bare]:
                del self.held[bare]
            self._tell(name, "unlocked", lock)

    def _tell(self, name: str, state: str, lock: FakeLock) -> None:
        mode, _, bare = name.partition(":")
        for changes, prefix in self._watchers.items():
            if bare.startswith(prefix) and not self.hushed:
                self.undelivered.append((changes, LockChange(bare, state, mode, lock.id, lock.transaction)))
        if not self.late:
            self.deliver()

    def deliver(self) -> None:
        """Let watchers have the events that are late."""
        for changes, change in self.undelivered:
            changes.put_nowait(change)
        self.undelivered.clear()


@dataclass
class FakeStore:
    """Tokens by id. `page` is how many are told at once, and `turn` is awaited before each page. `reads` counts."""

    held: dict[str, Token] = field(default_factory=dict)
    spent: dict[str, str] = field(default_factory=dict)
    page: int = 1000
    reads: int = 0
    pages: int = 0
    fails: Exception | None = None
    follows: bool = True
    turn: Callable[[], Coroutine[Any, Any, object]] | None = None
    feeds: list[asyncio.Queue[Change | None]] = field(default_factory=list)
    hushed: bool = False
    before_spend: Callable[[], Coroutine[Any, Any, object]] | None = None
    after_spend: Callable[[], Coroutine[Any, Any, object]] | None = None

    async def add(self, tokens: Sequence[Token]) -> None:
        self.put(*tokens)

    def put(self, *tokens: Token) -> None:
        for each in tokens:
            self.held[each.id] = each
            self.tell(Added(each))

    def tell(self, *changes: Change | None) -> None:
        for feed in self.feeds:
            for change in changes:
                if not self.hushed:
                    feed.put_nowait(change)

    async def unspent(self, **of: str | None) -> AsyncIterator[list[Token]]:
        self.reads += 1
        last = ""
        while True:
            if self.turn is not None:
                await self.turn()
            if self.fails is not None:
                raise self.fails
            found = sorted(
                (each for each in self.held.values() if each.id > last and self._in(each, of)), key=lambda t: t.id
            )[: self.page]
            if found:
                last = found[-1].id
                self.pages += 1
                yield found
            if len(found) < self.page:
                return

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        return {id: self.held[id] for id in ids if id in self.held}

    async def changes(self) -> AsyncIterator[Change]:
        if not self.follows:
            raise NotImplementedError
        feed: asyncio.Queue[Change | None] = asyncio.Queue()
        self.feeds.append(feed)
        try:
            yield Resync()
            while (change := await feed.get()) is not None:
                yield change
        finally:
            self.feeds.remove(feed)

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        if self.before_spend is not None:
            await self.before_spend()
        others = [each.id for each in tokens if self.spent.get(each.id, transaction) != transaction]
        if others:
            raise SpentAlready(others)
        for each in tokens:
            if each.id in self.held:
                del self.held[each.id]
                self.spent[each.id] = transaction
                self.tell(Spent(each.id))
        self.put(*outputs)
        if self.after_spend is not None:
            await self.after_spend()

    @staticmethod
    def _in(each: Token, of: dict[str, str | None]) -> bool:
        return all(value is None or getattr(each, name) == value for name, value in of.items())


def store_of(tokens: Iterable[Token], **options: Any) -> FakeStore:
    return FakeStore({each.id: each for each in tokens}, **options)
