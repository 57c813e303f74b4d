"""The role of a namespace: leadership acquired, transferred and lost, with a store that the test controls."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from genie.config import Settings
from genie.roles import FollowerRole, Following
from genie.server import namespace as namespaces
from genie.server.app import Server
from genie.server.namespace import Namespace
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch, Node, StateMachine
from support.network.wire import Wire
from support.processes.waiting import until


class ControlledStore(MemoryStore):
    """Grants leadership while it is `vacant`. Acknowledges commits immediately unless it is `slow`."""

    durable = True

    def __init__(self, *, vacant: bool = True) -> None:
        super().__init__()
        self.vacant, self.transfer_requested, self.commit_started, self.follows = (asyncio.Event() for _ in range(4))
        self.slow = False
        self.pending_commits: list[Callable[[BaseException | None], None]] = []
        self.resigned = False
        self.commits_after_resigning = 0
        """Number of commits after `resign`."""
        if vacant:
            self.vacant.set()

    async def open(
        self,
        node: Node,  # noqa: ARG002
        snapshot: Callable[[], Batch],
        on_role_changed: Callable[[FollowerRole], None],
    ) -> StateMachine:
        if self.resigned:
            snapshot()
        on_role_changed(Following("127.0.0.1:1", caught_up=True))
        self.follows.set()
        await self.vacant.wait()
        self.resigned = False
        return StateMachine()

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        self.commits_after_resigning += self.resigned
        if self.slow:
            self.pending_commits.append(done)
            self.commit_started.set()
        else:
            asyncio.get_running_loop().call_soon(done, None)

    def acknowledge(self) -> None:
        self.slow = False
        while self.pending_commits:
            self.pending_commits.pop()(None)

    async def wait_for_transfer_request(self) -> None:
        await self.transfer_requested.wait()
        self.transfer_requested.clear()
        self.vacant.clear()
        self.follows.clear()

    async def resign(self) -> None:
        self.resigned = True
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(**stores: ControlledStore) -> AsyncIterator[tuple[Server, tuple[str, int]]]:
    server = Server(Settings.from_options(port=0, admin_port=None, namespaces=tuple(stores)))
    for namespace, store in stores.items():
        server.namespaces[namespace].store = store
    address = await server.start()
    try:
        yield server, address
    finally:
        for store in stores.values():
            store.acknowledge()
        await server.stop()
        while Wire.made:
            await Wire.made.pop().close()


async def connect(address: tuple[str, int], namespace: str, **hello: Any) -> Wire:
    wire = await Wire.connect(address)
    wire.send("hello", namespace=namespace, **hello)
    await wire.expect("welcome")
    return wire


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
async def test_the_state_of_a_leader_is_freed_when_another_server_leads() -> None:
    async with serving(a=(store := ControlledStore())) as (server, address):
        namespace: Namespace = server.namespaces["a"]
        await until(lambda: namespace.is_leader)
        with_session = await connect(address, "a", session="a-secret-of-the-tests")
        await with_session.lock("exclusive:1", ref="r1")
        await with_session.request("exclusive:1", ref="r2")
        without_session = await connect(address, "a")
        without_session.send("watch", prefix="")
        await without_session.expect("watching")
        await without_session.lock("exclusive:2", onDisconnect="release")
        refs = [weakref.ref(namespace.pipeline), weakref.ref(namespace.manager)]
        store.transfer_requested.set()
        while (await with_session.receive())[0] != "closed":
            pass
        while (await without_session.receive())[0] != "closed":
            pass
        await store.follows.wait()
        await until(lambda: not server.connections)
        await until(lambda: not any(ref() for ref in refs))
        assert namespace.manager is None


async def test_a_stopping_server_does_not_acquire_leadership() -> None:
    async with serving(a=(busy := ControlledStore()), b=(other := ControlledStore(vacant=False))) as (server, address):
        await until(lambda: server.namespaces["a"].is_leader)
        wire = await connect(address, "a")
        busy.slow = True
        wire.send("request", resources=["exclusive:1"])
        await busy.commit_started.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        other.vacant.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not server.namespaces["b"].is_leader
        assert not stopping.done()
        busy.acknowledge()
        await wire.expect("queued")
        await wire.expect("locked")
        await stopping
        assert (busy.resigned, other.commits_after_resigning, busy.commits_after_resigning) == (True, 0, 0)


async def test_slow_commands_do_not_delay_the_next_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader executes one of them in an iteration of the event loop. Those that it drops have no effect."""
    monkeypatch.setattr(namespaces, "MAX_QUEUE_DRAIN_S", 0.0)
    async with serving(a=(store := ControlledStore())) as (server, address):
        await until(lambda: server.namespaces["a"].is_leader)
        wire = await connect(address, "a")
        (connection,) = server.connections
        connection.data_received(b'{"command":"inspect"}\n' * 1_000)
        store.transfer_requested.set()
        answers = 0
        while (await wire.receive())[0] != "closed":
            answers += 1
        assert store.resigned
        assert answers < 500


async def test_new_clients_do_not_delay_the_next_leader() -> None:
    """They may connect, or select the namespace, while a leader that transfers its leadership waits for its last commit."""
    async with serving(a=(store := ControlledStore())) as (server, address):
        await until(lambda: server.namespaces["a"].is_leader)
        wire = await connect(address, "a")
        store.slow = True
        wire.send("request", resources=["exclusive:1"])
        await store.commit_started.wait()
        (connection,) = server.connections
        store.transfer_requested.set()
        await until(lambda: connection.closing)
        new = await Wire.connect(address)
        new.send("hello", namespace="a", ref="1")
        assert (await new.expect("error"))["code"] == "unavailable"
        assert not store.resigned
        store.acknowledge()
        await wire.expect("queued")
        await wire.expect("locked")
        await until(lambda: store.resigned)


@pytest.mark.parametrize("is_stop_first", [True, False])
async def test_a_stop_during_a_transfer_of_leadership_waits_for_the_last_commit_only(*, is_stop_first: bool) -> None:
    with capture_logs() as log:
        async with serving(a=(store := ControlledStore())) as (server, address):
            await until(lambda: server.namespaces["a"].is_leader)
            wire = await connect(address, "a")
            store.slow = True
            wire.send("request", resources=["exclusive:1"])
            await store.commit_started.wait()
            if not is_stop_first:
                store.transfer_requested.set()
                await until(lambda: "leadership transfer started" in [line["event"] for line in log])
            stopping = asyncio.create_task(server.stop())
            await until(lambda: server.namespaces["a"].role == "stopping")
            store.transfer_requested.set()
            await until(lambda: "leadership transfer started" in [line["event"] for line in log])
            for _ in range(10):
                await asyncio.sleep(0)
            store.acknowledge()
            await stopping
            assert store.resigned
    assert [line for line in log if line["log_level"] == "warning"] == []


async def test_the_end_of_a_connection_does_not_delay_the_next_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that ends after the queued commands were dropped, and then another one with each commit."""
    monkeypatch.setattr(namespaces, "MAX_QUEUE_DRAIN_S", 0.0)
    async with serving(a=(store := ControlledStore())) as (server, address):
        await until(lambda: server.namespaces["a"].is_leader)
        wires = [await connect(address, "a") for _number in range(20)]
        for number, wire in enumerate(wires):
            await wire.lock(f"exclusive:{number}", onDisconnect="release")
        store.slow = True
        wires[-1].send("request", resources=["exclusive:more"])
        await store.commit_started.wait()
        store.transfer_requested.set()
        connections = list(server.connections)
        await until(lambda: all(connection.closing for connection in connections))
        await asyncio.sleep(0.001)  # the queued commands are dropped
        while not store.resigned and connections:
            connections.pop().abort()
            await until(lambda: len(server.connections) == len(connections))
            store.pending_commits.pop()(None)
            await until(lambda: bool(store.pending_commits) or store.resigned)
        assert len(connections) > 15


async def test_a_slow_disk_of_the_history_does_not_delay_the_next_leader(tmp_path: Path) -> None:
    settings = Settings.from_options(port=0, admin_port=None, namespaces=("a",), history_dir=str(tmp_path))
    server, store = Server(settings), ControlledStore()
    namespace = server.namespaces["a"]
    namespace.store = store
    await server.start()
    await until(lambda: namespace.is_leader)
    assert namespace.history is not None
    was_resigned = []
    namespace.history.join = lambda _timeout_s: was_resigned.append(store.resigned)  # type: ignore[method-assign]
    await server.stop()
    assert was_resigned == [True]


class UnreadableStore(ControlledStore):
    """A store with data that this version of Genie cannot read."""

    async def open(self, *_: object) -> StateMachine:
        raise ValueError("not written by this version of Genie")


async def test_a_server_logs_why_it_stops_when_it_cannot_serve_a_namespace() -> None:
    with capture_logs() as log:
        async with serving(a=ControlledStore(), b=UnreadableStore()) as (server, _):
            await server._stopped.wait()
    assert [line["reason"] for line in log if line["log_level"] == "error"] == ["not written by this version of Genie"]


class SilentStore(ControlledStore):
    """A store that does not answer. It needs some time to stop."""

    async def open(self, *_: object) -> StateMachine:
        try:
            await self.vacant.wait()
        finally:
            for _number in range(5):
                await asyncio.sleep(0)
        return StateMachine()


async def test_a_start_fails_with_the_error_of_one_of_several_namespaces() -> None:
    server = Server(Settings.from_options(port=0, admin_port=None, namespaces=("a", "b")))
    server.namespaces["a"].store = UnreadableStore()
    server.namespaces["b"].store = SilentStore(vacant=False)
    with pytest.raises(ValueError, match="not written by this version of Genie"):
        await server.run()
