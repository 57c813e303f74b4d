"""Batches, commits and replies of a leader, without sockets."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable

import pytest

from genie.config import Limits, Settings
from genie.core import LockManager, deadlock
from genie.observability.stats import Stats
from genie.protocol.resources import MAX_RESOURCES
from genie.server import commits, scheduler, unavailable
from genie.server.connection import Connection
from genie.server.listener import AdmissionControl
from genie.server.memory_bounds import COMMAND_FACTOR
from genie.server.pipeline import WATCH_FLUSH_INTERVAL_S, Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch, Store
from support.core.sliced_pipeline import exceed_store_timeout, expire, tick
from support.network.recording_transport import RecordingTransport
from support.processes.servers import WAIT_S

PING = b'{"command":"ping"}\n'
INSPECT = b'{"command":"inspect"}\n'


def request(*names: str, mode: str = "exclusive", transaction: str | None = None) -> bytes:
    resources = ",".join(f'"{mode}:{name}"' for name in names)
    owner = "" if transaction is None else f',"transactionName":"{transaction}"'
    return b'{"command":"request","payload":{"resources":[%b]%b}}\n' % (resources.encode(), owner.encode())


def release(id: int) -> bytes:
    return b'{"command":"release","payload":{"id":%d}}\n' % id


class ImmediateStore(MemoryStore):
    """A store that acknowledges immediately, and keeps the last batch."""

    durable = True
    full = False
    last = Batch()
    commits = 0

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        self.last = batch
        self.commits += 1
        done(None)


class ManualStore(MemoryStore):
    """A store whose commits are pending until the test acknowledges them."""

    durable = True
    full = False

    def __init__(self) -> None:
        super().__init__()
        self.pending_commits: list[Callable[[BaseException | None], None]] = []
        self.last = Batch()

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        self.pending_commits.append(done)
        self.last = batch


class PipelineWithClients:
    """A pipeline, its connections by name, and the number of messages of each write to them."""

    def __init__(self, store: Store | None = None, limits: Limits | None = None) -> None:
        self.written: list[tuple[str, int]] = []
        self.failures: list[BaseException] = []
        self.pipeline = Pipeline(
            LockManager(), store or MemoryStore(), limits or Limits(), Stats(), lambda: 0.0, self.failures.append
        )
        self.admission = AdmissionControl(Limits())

    def connect(self, name: str) -> Connection:
        connection = Connection(self.pipeline, Limits(), self.admission)
        connection.connection_made(RecordingTransport(lambda data: self.written.append((name, data.count(b"\n")))))
        return connection


async def test_after_its_lease_a_leader_commits_before_it_replies() -> None:
    store = ImmediateStore()
    clients = PipelineWithClients(store)
    client = clients.connect("client")
    client.data_received(PING)
    await asyncio.sleep(0)
    commits = store.commits
    client.data_received(PING)
    await asyncio.sleep(0)
    assert store.commits == commits
    clients.pipeline._commits._sent_at -= 2 * Settings().lease
    client.data_received(PING)
    await asyncio.sleep(0)
    assert store.commits == commits + 1
    assert len(clients.written) == 3


@pytest.mark.parametrize("line", [PING, b"bad\n", INSPECT])
async def test_a_flood_of_commands_does_not_delay_other_connections(line: bytes) -> None:
    clients = PipelineWithClients()
    flooding, quiet = clients.connect("flooding"), clients.connect("quiet")
    flooding.data_received(line * 10_000)
    quiet.data_received(PING)
    flooding.data_received(line * 10_000)
    await asyncio.sleep(0)
    if line is INSPECT:  # each ends its turn
        await asyncio.sleep(0)
    assert ("quiet", 1) in clients.written
    assert (
        sum(lines for name, lines in clients.written if name == "flooding")
        <= scheduler.MAX_BATCH + scheduler.QUANTUM + scheduler.CHUNK
    )
    await clients.pipeline.drained()
    assert sum(lines for name, lines in clients.written if name == "flooding") == 20_000
    assert (flooding.queued_bytes, clients.pipeline._scheduler.bytes, flooding.input_queue, clients.failures) == (
        0,
        0,
        type(flooding.input_queue)(),
        [],
    )


async def test_connections_are_read_between_any_two_batches() -> None:
    """Also when a timer runs the pipeline: the event loop polls sockets after each run."""
    clients = PipelineWithClients()
    flooding = clients.connect("flooding")
    flooding.data_received(PING * 50_000)
    for _ in range(5):
        expire(clients.pipeline)
        await asyncio.sleep(0)
    before = sum(lines for _, lines in clients.written)
    await asyncio.sleep(0)
    assert (
        0
        < sum(lines for _, lines in clients.written) - before
        <= scheduler.MAX_BATCH + scheduler.QUANTUM + scheduler.CHUNK
    )
    await clients.pipeline.drained()


async def contending(clients: PipelineWithClients) -> tuple[Connection, Connection, Connection]:
    """Return the holder of the lock 1, a client that waits for it with the request 2, and another client."""
    holder, waiter, other = clients.connect("holder"), clients.connect("waiter"), clients.connect("other")
    holder.data_received(request("a"))
    waiter.data_received(request("a"))
    await asyncio.sleep(0)
    clients.written.clear()
    return holder, waiter, other


async def test_a_grant_is_sent_before_the_reply_to_the_release() -> None:
    """Also before the replies to other connections, because others may wait for the lock in turn."""
    clients = PipelineWithClients()
    holder, _, other = await contending(clients)
    clients.connect("first").data_received(PING)  # executed immediately
    other.data_received(PING)
    holder.data_received(release(1))
    await asyncio.sleep(0)
    assert clients.written == [("first", 1), ("waiter", 1), ("other", 1), ("holder", 1)]


async def test_in_memory_the_first_input_of_an_iteration_is_executed_immediately() -> None:
    """So the next holder of a contended lock runs while the server executes the commands of others."""
    clients = PipelineWithClients()
    holder, waiter, other = await contending(clients)
    holder.data_received(release(1))
    assert clients.written == [("waiter", 1), ("holder", 1)]
    other.data_received(PING)
    waiter.data_received(release(2))
    assert len(clients.written) == 2, "the rest of the iteration is one batch, in order"
    await asyncio.sleep(0)
    assert clients.written[2:] == [("other", 1), ("waiter", 1)]
    other.data_received(PING)
    assert clients.written[4:] == [("other", 1)]
    clients.pipeline.stop()
    await asyncio.sleep(0)
    other.data_received(PING)
    holder.data_received(PING)
    await asyncio.sleep(0)
    assert len(clients.written) == 5, "a stopped pipeline sends nothing"


async def test_draining_ends_after_an_input_that_was_executed_immediately() -> None:
    clients = PipelineWithClients()
    clients.connect("client").data_received(PING)
    async with asyncio.timeout(WAIT_S):
        await clients.pipeline.drained()
    assert clients.pipeline._drained is None, "otherwise an empty batch follows each input that is executed immediately"


async def test_only_a_lone_connection_commits_in_the_same_iteration() -> None:
    store = ImmediateStore()
    clients = PipelineWithClients(store)
    first, second = clients.connect("first"), clients.connect("second")
    first.data_received(request("a"))
    await asyncio.sleep(0)
    commits = store.commits
    first.data_received(request("b"))
    assert (store.commits, clients.written) == (commits + 1, [("first", 2)] * 2)
    second.data_received(request("c"))
    first.data_received(request("d"))
    assert store.commits == commits + 1, "both connections are active"
    await asyncio.sleep(0)
    assert (store.commits, len(store.last.changes)) == (commits + 2, 2)
    first.data_received(request("e"))
    second.data_received(request("f"))
    assert store.commits == commits + 2, "both connections were active"
    await asyncio.sleep(0)
    assert (store.commits, len(store.last.changes)) == (commits + 3, 2)
    assert not clients.failures


async def test_a_grant_to_a_waiting_request_is_committed_before_the_rest_of_the_iteration_is_executed() -> None:
    """The next holder of a contended lock runs meanwhile. Other first inputs are committed together with the rest."""
    store = ManualStore()
    clients = PipelineWithClients(store)
    holder, waiter, other = clients.connect("holder"), clients.connect("waiter"), clients.connect("other")
    holder.data_received(request("a"))
    assert not store.pending_commits, "it grants a lock, but nobody waited for it"
    waiter.data_received(request("a"))
    await asyncio.sleep(0)
    store.pending_commits.pop()(None)
    await clients.pipeline.drained()
    clients.written.clear()
    holder.data_received(release(1))
    other.data_received(request("b"))
    assert store.last.changes.keys() == {1, 2}
    await asyncio.sleep(0)
    assert not clients.written, "nothing is sent before it is stored"
    store.pending_commits.pop()(None)
    assert clients.written == [("waiter", 1), ("holder", 1)]
    assert store.last.changes.keys() == {3}
    store.pending_commits.pop()(None)
    assert clients.written[2:] == [("other", 2)]
    clients.pipeline.stop()


async def test_a_heartbeat_commits_what_was_executed_before_it() -> None:
    """Its acknowledgement delivers all messages, so it must have all changes."""
    store = ManualStore()
    clients = PipelineWithClients(store)
    clients.pipeline._commits._heartbeat_s = 0
    clients.connect("client").data_received(request("a"))
    tick(clients.pipeline)
    assert store.last.changes.keys() == {1}
    clients.pipeline.stop()


async def test_the_lock_limit_is_exact_although_it_is_not_checked_for_each_request() -> None:
    """The waiting requests, which are granted at once, would hide the limit from a check that ignores them."""
    waiting = 58
    clients = PipelineWithClients(limits=Limits(max_locks=waiting * MAX_RESOURCES + 8))
    client, table = clients.connect("client"), clients.pipeline.manager.table
    names = [str(number) for number in range(MAX_RESOURCES)]
    client.data_received(request(*names))
    for _ in range(waiting):
        client.data_received(request(*names, mode="shared"))
    client.data_received(release(1))
    await clients.pipeline.drained()
    for _ in range(3 * waiting):
        await asyncio.sleep(0)  # the requests are granted in slices
    assert table.locks == waiting * MAX_RESOURCES
    for number in range(20):
        client.data_received(request(f"b{number}"))
    await clients.pipeline.drained()
    assert (table.locks, clients.pipeline._commits._stats.errors["too-many"]) == (waiting * MAX_RESOURCES + 8, 12)
    assert not clients.failures


async def test_a_request_whose_search_for_a_deadlock_takes_too_long_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlock, "MAX_ARRIVAL_STEPS", 2)
    clients = PipelineWithClients()
    client = clients.connect("client")
    for transaction, name in (("t1", "a"), ("t2", "b"), ("t1", "b"), ("t2", "a")):
        client.data_received(request(name, transaction=transaction))
    await clients.pipeline.drained()
    assert clients.pipeline._commits._stats.errors["too-many"] == 1
    assert len(clients.pipeline.manager.table.waiting) == 1
    assert not clients.failures


async def test_blank_lines_are_ignored() -> None:
    clients = PipelineWithClients()
    flooding = clients.connect("flooding")
    flooding.data_received(b"\n" * 1_000)
    assert not clients.pipeline._scheduler
    flooding.data_received(b"\n" * 10_000)
    flooding.data_received(b"\r\n" * 10_000)
    flooding.data_received(b"\n" + PING + b"\r\n \n" + PING)
    await clients.pipeline.drained()
    assert sum(lines for _, lines in clients.written) == 2
    assert not clients.failures


@pytest.mark.parametrize("start", [b"", b"half a"])
async def test_queued_lines_that_are_shorter_than_commands_take_little_memory(start: bytes) -> None:
    """A line of two bytes takes 56 bytes as an object, which is not among the bytes that are counted."""
    clients = PipelineWithClients()
    clients.connect("first").data_received(PING + b"bad\n" * 100)  # a batch is scheduled: later input is queued
    flooding = clients.connect("flooding")
    flooding.data_received(PING + start)
    lines = [b"xy\n" * 2_700 for _ in range(7)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for data in lines:
        flooding.data_received(b"" + data)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert flooding.input_queue
    assert taken < COMMAND_FACTOR * sum(map(len, lines))
    await clients.pipeline.drained()
    assert clients.pipeline._commits._stats.errors["bad-json"] == 100 + 7 * 2_700
    assert sum(count for name, count in clients.written if name == "flooding") == 1 + 7 * 2_700
    assert not clients.failures


async def test_the_only_active_connection_is_answered_immediately_and_in_order() -> None:
    clients = PipelineWithClients()
    client = clients.connect("client")
    client.data_received(PING)
    await clients.pipeline.drained()
    clients.written.clear()
    client.data_received(PING)
    assert clients.written == [("client", 1)]
    client.data_received(INSPECT + PING + b"bad\n")
    client.data_received(PING)
    assert sum(lines for _, lines in clients.written) == 1, "a slow command, and those after it, wait for their turn"
    await clients.pipeline.drained()
    assert sum(lines for _, lines in clients.written) == 5


async def test_ids_are_reserved_in_the_store_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the id of a waiting request, which is not stored. Otherwise it could be assigned twice after a crash."""
    monkeypatch.setattr(commits, "ID_RESERVATION", 10)
    store = ImmediateStore()
    clients = PipelineWithClients(store)
    client = clients.connect("client")
    for number in range(50):
        client.data_received(b'{"command":"request","payload":{"resources":["exclusive:A"]}}\n')
        await clients.pipeline.drained()
        assert sum(lines for _, lines in clients.written) == number + 2, "the first one is also locked"
        assert clients.pipeline.manager.next_id <= store.last.next_id == clients.pipeline.snapshot().next_id
    assert not clients.failures
    clients.pipeline.stop()


async def test_buffered_watch_events_do_not_disconnect_a_watcher_while_the_store_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ManualStore()
    clients = PipelineWithClients(store)
    watcher, other = clients.connect("watcher"), clients.connect("other")
    clients.pipeline.submit(watcher, [b'{"command":"watch","payload":{"prefix":""}}'], 1)
    await asyncio.sleep(0)
    store.pending_commits.pop()(None)
    clients.pipeline.submit(other, [b'{"command":"request","payload":{"resources":["exclusive:a","exclusive:b"]}}'], 1)
    await asyncio.sleep(0)
    monkeypatch.setattr(unavailable, "MAX_BUFFERED_REPLIES", 1)
    exceed_store_timeout(clients.pipeline)
    clients.pipeline.submit(watcher, [PING], 1)
    store.pending_commits.pop()(None)
    await asyncio.sleep(2 * WATCH_FLUSH_INTERVAL_S)
    assert clients.written == [("watcher", 1), ("other", 2), ("watcher", 3)]
    clients.pipeline.stop()


async def test_a_batch_is_bounded_in_bytes() -> None:
    store = ManualStore()
    clients = PipelineWithClients(store)
    first, second, third = (clients.connect(name) for name in ("first", "second", "third"))
    clients.pipeline.submit(clients.connect("other"), [PING], 0)  # executed immediately
    clients.pipeline.submit(first, [PING], scheduler.MAX_BATCH_BYTES // 2)
    clients.pipeline.submit(second, [PING], scheduler.MAX_BATCH_BYTES // 2)
    request = b'{"command":"request","payload":{"resources":["exclusive:a"]}}'
    clients.pipeline.submit(third, [request], scheduler.MAX_BATCH_BYTES // 2)
    await asyncio.sleep(0)
    store.pending_commits.pop()(None)
    assert clients.written == [("other", 1), ("first", 1), ("second", 1)]
    store.pending_commits.pop()(None)
    assert clients.written[3:] == [("third", 2)]
    clients.pipeline.stop()


async def test_the_snapshot_of_a_stopped_leader_survives_the_end_of_its_connections() -> None:
    """The store may have to be restored from it. It includes retained replies, which clients may not have received."""
    clients = PipelineWithClients(ImmediateStore())
    with_session, other = clients.connect("with_session"), clients.connect("other")
    with_session.data_received(b'{"command":"hello","payload":{"session":"a-secret-of-the-tests"}}\n')
    with_session.data_received(b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"1"}}\n')
    await clients.pipeline.drained()
    (id_,) = clients.pipeline.manager.table.held
    other.data_received(b'{"command":"release","payload":{"id":%d}}\n' % id_)
    await clients.pipeline.drained()
    snapshot = clients.pipeline.snapshot()
    assert id_ in snapshot.changes
    clients.pipeline.stop()
    with_session.connection_lost(None)
    assert clients.pipeline.snapshot().changes == snapshot.changes
    clients.pipeline.dispose()
    assert not clients.pipeline.snapshot().changes
