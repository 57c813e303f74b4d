"""One namespace in a server: what is left of its time as leader, with a store that does as it is told."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from genie.config import Settings
from genie.server.app import Server
from genie.server.namespace import Namespace
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch, Node, StateMachine
from servers import WAIT_S
from wire import Wire


class Shelf(MemoryStore):
    """Leads when it is `free`, and hands over when it is `wished` for. Answers commits unless it is `slow`."""

    durable = True

    def __init__(self, *, free: bool = True) -> None:
        super().__init__()
        self.free, self.wished, self.asked, self.followed = (asyncio.Event() for _ in range(4))
        self.slow = False
        self.waiting: list[Callable[[BaseException | None], None]] = []
        self.resigned = False
        self.deferred = 0
        """Commits behind the resignation."""
        if free:
            self.free.set()

    async def open(
        self,
        node: Node,  # noqa: ARG002
        snapshot: Callable[[], Batch],
        on_leader_changed: Callable[[str | None], None],
    ) -> StateMachine:
        if self.resigned:
            snapshot()
        on_leader_changed("127.0.0.1:1")
        self.followed.set()
        await self.free.wait()
        self.resigned = False
        return StateMachine()

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        self.deferred += self.resigned
        if self.slow:
            self.waiting.append(done)
            self.asked.set()
        else:
            asyncio.get_running_loop().call_soon(done, None)

    def answer(self) -> None:
        self.slow = False
        while self.waiting:
            self.waiting.pop()(None)

    async def wait_for_transfer_request(self) -> None:
        await self.wished.wait()
        self.wished.clear()
        self.free.clear()
        self.followed.clear()

    async def resign(self) -> None:
        self.resigned = True
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(**stores: Shelf) -> AsyncIterator[tuple[Server, tuple[str, int]]]:
    server = Server(Settings.from_options(port=0, admin_port=None, namespaces=tuple(stores)))
    for namespace, store in stores.items():
        server.namespaces[namespace].store = store
    address = await server.start()
    try:
        yield server, address
    finally:
        for store in stores.values():
            store.answer()
        await server.stop()
        while Wire.made:
            await Wire.made.pop().close()


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.001)


async def connected(address: tuple[str, int], namespace: str, **hello: Any) -> Wire:
    wire = await Wire.connect(address)
    wire.send("hello", namespace=namespace, **hello)
    await wire.expect("welcome")
    return wire


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
async def test_all_that_a_leader_knew_is_freed_when_another_leads() -> None:
    async with serving(a=(shelf := Shelf())) as (server, address):
        seat: Namespace = server.namespaces["a"]
        await until(lambda: seat.is_leader)
        kept = await connected(address, "a", session="a-secret-of-the-seat")
        await kept.lock("exclusive:1", ref="r1")
        await kept.request("exclusive:1", ref="r2")
        plain = await connected(address, "a")
        plain.send("watch", prefix="")
        await plain.expect("watching")
        await plain.lock("exclusive:2", onDisconnect="release")
        refs = [weakref.ref(seat.pipeline), weakref.ref(seat.manager)]
        shelf.wished.set()
        while (await kept.receive())[0] != "closed":
            pass
        while (await plain.receive())[0] != "closed":
            pass
        await shelf.followed.wait()
        await until(lambda: not server.connections)
        await until(lambda: not any(ref() for ref in refs))
        assert seat.manager is None


async def test_who_stops_does_not_begin_to_lead() -> None:
    async with serving(a=(busy := Shelf()), b=(other := Shelf(free=False))) as (server, address):
        await until(lambda: server.namespaces["a"].is_leader)
        wire = await connected(address, "a")
        busy.slow = True
        wire.send("request", resources=["exclusive:1"])
        await busy.asked.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        other.free.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not server.namespaces["b"].is_leader
        assert not stopping.done()
        busy.answer()
        await wire.expect("queued")
        await wire.expect("locked")
        await stopping
        assert (busy.resigned, other.deferred, busy.deferred) == (True, 0, 0)


class Foreign(Shelf):
    """Nothing that this version of Genie could read."""

    async def open(self, *_: object) -> StateMachine:
        raise ValueError("not written by this version of Genie")


async def test_it_is_told_why_a_server_stops_that_can_serve_only_one_of_its_namespaces() -> None:
    with capture_logs() as said:
        async with serving(a=Shelf(), b=Foreign()) as (server, _):
            await server._stopped.wait()
    assert [line["reason"] for line in said if line["log_level"] == "error"] == ["not written by this version of Genie"]
