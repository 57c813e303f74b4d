"""Whose turn it is, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from genie.config import Limits, Settings
from genie.core import LockManager
from genie.observability.stats import Stats
from genie.server import pipeline, scheduler
from genie.server.connection import Connection
from genie.server.listener import AdmissionControl
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch, Store
from recording_transport import RecordingTransport

PING = b'{"command":"ping"}\n'
LOOK = b'{"command":"inspect"}\n'


class Shelf(MemoryStore):
    """Stores at once, and remembers the last batch."""

    durable = True
    full = False
    last = Batch()
    commits = 0

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        self.last = batch
        self.commits += 1
        done(None)


class Silence(MemoryStore):
    """Takes batches, and answers when it is told to."""

    durable = True
    full = False

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[BaseException | None], None]] = []

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        self.waiting.append(done)


class Room:
    def __init__(self, store: Store | None = None) -> None:
        self.told: list[tuple[str, int]] = []
        self.failed: list[BaseException] = []
        self.pipeline = Pipeline(
            LockManager(), store or MemoryStore(), Limits(), Stats(), lambda: 0.0, self.failed.append
        )
        self.admission = AdmissionControl(Limits())

    def enter(self, name: str) -> Connection:
        connection = Connection(self.pipeline, Limits(), self.admission)
        connection.connection_made(RecordingTransport(lambda data: self.told.append((name, data.count(b"\n")))))
        return connection


async def test_who_may_not_lead_any_more_looks_before_it_answers() -> None:
    store = Shelf()
    room = Room(store)
    asking = room.enter("asking")
    asking.data_received(PING)
    await asyncio.sleep(0)
    commits = store.commits
    asking.data_received(PING)
    await asyncio.sleep(0)
    assert store.commits == commits
    room.pipeline._committed_at -= 2 * Settings().lease
    asking.data_received(PING)
    await asyncio.sleep(0)
    assert store.commits == commits + 1
    assert len(room.told) == 3


@pytest.mark.parametrize("line", [PING, b"bad\n", LOOK])
async def test_who_says_much_does_not_keep_others_waiting(line: bytes) -> None:
    room = Room()
    loud, quiet = room.enter("loud"), room.enter("quiet")
    loud.data_received(line * 10_000)
    quiet.data_received(PING)
    loud.data_received(line * 10_000)
    await asyncio.sleep(0)
    if line is LOOK:  # a batch ends with it
        await asyncio.sleep(0)
    assert ("quiet", 1) in room.told
    assert (
        sum(lines for name, lines in room.told if name == "loud")
        <= scheduler.MAX_BATCH + scheduler.QUANTUM + scheduler.CHUNK
    )
    await room.pipeline.drained()
    assert sum(lines for name, lines in room.told if name == "loud") == 20_000
    assert (loud.queued_bytes, room.pipeline._scheduler.bytes, loud.input_queue, room.failed) == (
        0,
        0,
        type(loud.input_queue)(),
        [],
    )


async def test_input_is_read_between_any_two_batches() -> None:
    """However often a deadline passes meanwhile: each run of the pipeline is followed by a look at the sockets."""
    room = Room()
    loud = room.enter("loud")
    loud.data_received(PING * 50_000)
    for _ in range(5):
        room.pipeline._on_expiry_timer()
        await asyncio.sleep(0)
    before = sum(lines for _, lines in room.told)
    await asyncio.sleep(0)
    assert (
        0 < sum(lines for _, lines in room.told) - before <= scheduler.MAX_BATCH + scheduler.QUANTUM + scheduler.CHUNK
    )
    await room.pipeline.drained()


async def test_blank_lines_are_nobodys_turn() -> None:
    room = Room()
    loud = room.enter("loud")
    loud.data_received(b"\n" * 1_000)
    assert not room.pipeline._scheduler
    loud.data_received(b"\n" * 10_000)
    loud.data_received(b"\r\n" * 10_000)
    loud.data_received(b"\n" + PING + b"\r\n \n" + PING)
    await room.pipeline.drained()
    assert sum(lines for _, lines in room.told) == 2
    assert not room.failed


async def test_who_talks_alone_is_answered_on_the_spot_and_in_order() -> None:
    room = Room()
    only = room.enter("only")
    only.data_received(PING)
    await room.pipeline.drained()
    room.told.clear()
    only.data_received(PING)
    assert room.told == [("only", 1)]
    only.data_received(LOOK + PING + b"bad\n")
    only.data_received(PING)
    assert sum(lines for _, lines in room.told) == 2, "behind a long look it waits for its turn"
    await room.pipeline.drained()
    assert sum(lines for _, lines in room.told) == 5


async def test_an_id_is_stored_as_given_out_before_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a request that waits, which is not stored itself. Or another would get it after a crash."""
    monkeypatch.setattr(pipeline, "ID_RESERVATION", 10)
    shelf = Shelf()
    room = Room(shelf)
    client = room.enter("client")
    for number in range(50):
        client.data_received(b'{"command":"request","payload":{"resources":["exclusive:A"]}}\n')
        await room.pipeline.drained()
        assert sum(lines for _, lines in room.told) == number + 2, "the first is locked at once"
        assert room.pipeline.manager.next_id <= shelf.last.next_id == room.pipeline.snapshot().next_id
    assert not room.failed
    room.pipeline.stop()


async def test_what_a_watcher_is_still_to_be_told_does_not_cut_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Silence()
    room = Room(store)
    watcher, other = room.enter("watcher"), room.enter("other")
    room.pipeline.submit(watcher, [b'{"command":"watch","payload":{"prefix":""}}'], 1)
    await asyncio.sleep(0)
    store.waiting.pop()(None)
    room.pipeline.submit(other, [b'{"command":"request","payload":{"resources":["exclusive:a","exclusive:b"]}}'], 1)
    await asyncio.sleep(0)
    monkeypatch.setattr(pipeline, "MAX_BUFFERED_REPLIES", 1)
    room.pipeline._on_store_timeout()
    room.pipeline.submit(watcher, [PING], 1)
    store.waiting.pop()(None)
    await asyncio.sleep(2 * pipeline.WATCH_FLUSH_INTERVAL_S)
    assert room.told == [("watcher", 1), ("other", 2), ("watcher", 3)]
    room.pipeline.stop()


async def test_long_commands_do_not_make_one_long_batch() -> None:
    store = Silence()
    room = Room(store)
    first, second, third = (room.enter(name) for name in ("first", "second", "third"))
    room.pipeline.submit(first, [PING], scheduler.MAX_BATCH_BYTES // 2)
    room.pipeline.submit(second, [PING], scheduler.MAX_BATCH_BYTES // 2)
    request = b'{"command":"request","payload":{"resources":["exclusive:a"]}}'
    room.pipeline.submit(third, [request], scheduler.MAX_BATCH_BYTES // 2)
    await asyncio.sleep(0)
    store.waiting.pop()(None)
    assert room.told == [("first", 1), ("second", 1)]
    store.waiting.pop()(None)
    assert room.told[2:] == [("third", 2)]
    room.pipeline.stop()


async def test_what_a_leader_knew_stays_whole_when_its_connections_go() -> None:
    """It may have to be written anew. What a session was told last is part of it: it may not have come there."""
    room = Room(Shelf())
    kept, other = room.enter("kept"), room.enter("other")
    kept.data_received(b'{"command":"hello","payload":{"session":"a-secret-of-somebody"}}\n')
    kept.data_received(b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"1"}}\n')
    await room.pipeline.drained()
    (id_,) = room.pipeline.manager.table.held
    other.data_received(b'{"command":"release","payload":{"id":%d}}\n' % id_)
    await room.pipeline.drained()
    whole = room.pipeline.snapshot()
    assert id_ in whole.changes
    room.pipeline.stop()
    kept.connection_lost(None)
    assert room.pipeline.snapshot().changes == whole.changes
    room.pipeline.dispose()
    assert not room.pipeline.snapshot().changes
