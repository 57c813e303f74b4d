"""Fakes of Genie and of a token store whose behaviour a test controls, under a virtual clock."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genie import Insufficient, LockLost, Unavailable
from genie.testing.simulation.loop import SimLoop
from genie_tokens.errors import SpentAlready
from genie_tokens.store import Added, Change, Resync, Spent
from genie_tokens.token import MAX_AMOUNT, Token

GBP = {"token_type": "Fiat", "identifier": "GBP"}
ALICE = {"owner": "alice", **GBP}


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop with a virtual clock, which does not wait for timers."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            runner.run(test(*args, **options))

    return run


async def settle() -> None:
    """Run all tasks that are ready."""
    for _ in range(50):
        await asyncio.sleep(0)


async def open_subscription(*selectors: Any) -> None:
    """Let selectors subscribe to lock events, as they do under contention."""
    for selector in selectors:
        selector._context.subscription._contended_share = 1.0
        selector._context.subscription.record_request(contended=True)
    await settle()


async def cause_lock_events(genie: FakeGenie, seconds: float) -> None:
    """Cause so many lock events that a subscription is expensive."""
    for _ in range(round(seconds * 10)):
        genie.end(genie.lock_as_other(*(f"elsewhere-{number}" for number in range(50))))
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
        self.genie.end(self)  # the request takes effect even if the caller is cancelled
        await asyncio.sleep(self.genie.delay_s)
        if self.genie.down:
            raise Unavailable("the fake is down")

    def detach(self) -> int:
        if self.id not in self.genie.locks:
            raise LockLost("it is lost", id=self.id)
        return self.id

    async def extend(self, seconds: float) -> None:
        await asyncio.sleep(self.genie.delay_s)
        if self.id not in self.genie.locks:
            raise LockLost("it is lost", id=self.id)
        self.genie.extended.append(self.id)
        self.genie.hold(self, seconds)


class FakeGenie:
    """A fake of the client that grants locks in memory.

    `requests`: the token ids of each call of `acquire_any`, in order. `muted`: watchers get no events. `delayed`: watchers
    get the events when the test calls `deliver`.
    """

    def __init__(self) -> None:
        self.ids = itertools.count(101)
        self.locks: dict[int, FakeLock] = {}
        self.held: dict[str, dict[int, str | None]] = {}
        self.requests: list[list[str]] = []
        self.extended: list[int] = []
        self.delay_s = 0.0
        self.down = False
        self.muted = False
        self.delayed = False
        self.undelivered: list[tuple[asyncio.Queue[LockChange | None], LockChange]] = []
        self.before_watch: Callable[[], None] | None = None
        self.answer: asyncio.Event | None = None
        """If it is not None, grants are returned once it is set."""
        self._watchers: dict[asyncio.Queue[LockChange | None], str] = {}

    def holders(self, id: str) -> set[str | None]:
        return set(self.held.get(f"token/{id}", {}).values())

    @property
    def watcher_count(self) -> int:
        return len(self._watchers)

    @property
    def tokens_held(self) -> set[str]:
        return {name.removeprefix("token/") for name in self.held if name.startswith("token/")}

    def lock_as_other(self, *ids: str, transaction: str | None = "other", lease: float = 1e6) -> FakeLock:
        """Lock tokens as another client."""
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
        self.requests.append([name.removeprefix("exclusive:token/") for name in resources])
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
            raise Unavailable("the fake has ended the watch")
        finally:
            del self._watchers[changes]

    def disconnect_watchers(self) -> None:
        for changes in self._watchers:
            changes.put_nowait(None)

    def lock(self, resources: tuple[str, ...], transaction: str | None, lease: float) -> FakeLock:
        lock = FakeLock(self, next(self.ids), resources, transaction)
        self.locks[lock.id] = lock
        for name in resources:
            self.held.setdefault(name.partition(":")[2], {})[lock.id] = transaction
            self._publish(name, "locked", lock)
        self.hold(lock, lease)
        return lock

    def hold(self, lock: FakeLock, seconds: float) -> None:
        if lock.timer is not None:
            lock.timer.cancel()
        lock.timer = asyncio.get_running_loop().call_later(seconds, self.expire, lock)

    def expire(self, lock: FakeLock) -> None:
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
            self._publish(name, "unlocked", lock)

    def _publish(self, name: str, state: str, lock: FakeLock) -> None:
        mode, _, bare = name.partition(":")
        for changes, prefix in self._watchers.items():
            if bare.startswith(prefix) and not self.muted:
                self.undelivered.append((changes, LockChange(bare, state, mode, lock.id, lock.transaction)))
        if not self.delayed:
            self.deliver()

    def deliver(self) -> None:
        """Deliver the delayed events to the watchers."""
        for changes, change in self.undelivered:
            changes.put_nowait(change)
        self.undelivered.clear()


@dataclass
class FakeStore:
    """A token store in memory. `page` is the page size of `unspent`, whose calls `load_count` counts. `before_page` is
    awaited before each page. `error` is raised by it. Without `has_feed` there is no change feed; while it is `muted` it
    reports nothing.
    """

    held: dict[str, Token] = field(default_factory=dict)
    spent: dict[str, str] = field(default_factory=dict)
    page: int = 1000
    load_count: int = 0
    pages: int = 0
    error: Exception | None = None
    has_feed: bool = True
    before_page: Callable[[], Coroutine[Any, Any, object]] | None = None
    feeds: list[asyncio.Queue[Change | None]] = field(default_factory=list)
    muted: bool = False
    before_spend: Callable[[], Coroutine[Any, Any, object]] | None = None
    after_spend: Callable[[], Coroutine[Any, Any, object]] | None = None

    async def add(self, tokens: Sequence[Token]) -> None:
        self.put(*tokens)

    def put(self, *tokens: Token) -> None:
        for each in tokens:
            self.held[each.id] = each
            self.publish(Added(each))

    def publish(self, *changes: Change | None) -> None:
        for feed in self.feeds:
            for change in changes:
                if not self.muted:
                    feed.put_nowait(change)

    async def unspent(self, **of: str | None) -> AsyncIterator[list[Token]]:
        self.load_count += 1
        last = ""
        while True:
            if self.before_page is not None:
                await self.before_page()
            if self.error is not None:
                raise self.error
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
        if not self.has_feed:
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
                self.publish(Spent(each.id))
        self.put(*outputs)
        if self.after_spend is not None:
            await self.after_spend()

    @staticmethod
    def _in(each: Token, of: dict[str, str | None]) -> bool:
        return all(value is None or getattr(each, name) == value for name, value in of.items())


def store_of(tokens: Iterable[Token], **options: Any) -> FakeStore:
    return FakeStore({each.id: each for each in tokens}, **options)
