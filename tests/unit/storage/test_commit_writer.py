"""The commit writer: what it concludes from the end of the log, and how it retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import structlog

from genie.storage.redis.commit import (
    COMMIT_TIMEOUT_S,
    FINISHED,
    AckPolicy,
    BatchInFlight,
    CommitEncoder,
    CommitWriter,
    Outcome,
)
from genie.storage.redis.connection import ErrorReply, RedisFailure
from genie.storage.redis.keyspace import Checkpoint, Keyspace, LeaderEpoch, Meta
from genie.storage.redis.log import EpochHistory, Position
from genie.storage.redis.outage import OutageLog
from genie.storage.redis.primary import Primary
from genie.storage.redis.url import Address
from genie.storage.store import Batch, LeadershipLost
from genie.testing.simulation.loop import SimLoop
from support.storage.stores import soon

OWN = LeaderEpoch(7, "nonce", "{n}:state:7-nonce")
INDEX = 3
"""The index of the last stored batch."""
CHECKPOINT = Checkpoint((7, 1), Batch())


class ScriptedConnection:
    """Replies to the next commits with `rejections`, and to later ones as if the batch was appended."""

    address = Address("127.0.0.1", 1)
    version = 7, 0
    unsent_bytes = 0

    def __init__(self, rejections: list[object]) -> None:
        self._rejections = rejections

    def send(
        self, command: bytes, on_reply: Callable[[Any], None], replies: int = 1, expected_reply: bytes = b""
    ) -> None:
        del command, replies
        reply = self._rejections.pop(0) if self._rejections else expected_reply
        asyncio.get_running_loop().call_soon(on_reply, reply)

    def close(self) -> None:
        pass


class ScriptedPrimary:
    """Connects to a Redis that rejects commits, although its log ends with the last stored batch."""

    def __init__(self, rejections: list[object]) -> None:
        self._rejections = rejections
        self.errors: list[object] = []

    async def connect(self) -> ScriptedConnection:
        return ScriptedConnection(self._rejections)

    def on_error(self, error: object, address: Address) -> None:
        del address
        self.errors.append(error)


def keyspace_of(primary: Primary, meta: Meta | None) -> Keyspace:
    """Return the keyspace of the leader of the epoch `OWN`, which always reads `meta`."""
    keyspace = Keyspace(primary, "n")
    keyspace.epoch, keyspace.history = OWN, EpochHistory(((3, 50), (7, 0)))

    async def watch(_connection: object) -> Meta | None:
        return meta

    keyspace.watch = watch  # type: ignore[assignment]
    return keyspace


def writer_of(
    primary: Primary, meta: Meta | None = None, on_stored: Callable[[BatchInFlight], None] = lambda _: None
) -> CommitWriter:
    """Return a writer that has stored `INDEX` batches."""
    keyspace = keyspace_of(primary, meta)
    writer = CommitWriter(
        primary,
        keyspace,
        AckPolicy(0, fsync=False),
        structlog.get_logger(),
        OutageLog(structlog.get_logger()),
        on_stored,
        lambda _: None,
    )
    writer.start_epoch(CommitEncoder(keyspace), Batch())
    writer.batch.index = INDEX
    return writer


def not_reported(error: BaseException | None) -> None:
    """Fail: the tests finish no batch, so only a defect of the recovery is reported."""
    raise AssertionError(error)


def meta_at(position: Position, epoch: LeaderEpoch = OWN, *, has_log: bool = True) -> Meta:
    return Meta(epoch, None, position, CHECKPOINT, ((3, 50),), has_log)


async def test_an_error_within_a_transaction_is_retried_with_a_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may accept XADD when it is queued, and reject it when it is executed."""
    delays: list[float] = []

    class InstantBackoff:
        def next_delay(self) -> float:
            delays.append(0)
            return 0

    monkeypatch.setattr("genie.storage.redis.commit.new_backoff", InstantBackoff)
    rejection = [b"OK", b"QUEUED", [ErrorReply("MISCONF Errors writing to the AOF file")], b"OK"]
    primary = ScriptedPrimary([rejection] * 5)
    stored: asyncio.Future[BatchInFlight] = asyncio.get_running_loop().create_future()
    writer = writer_of(cast("Primary", primary), meta_at((7, INDEX)), stored.set_result)
    await writer.open()
    writer.write(Batch(), not_reported)
    assert await stored is writer.batch
    assert (writer._outage_log.failure_count, len(delays)) == (5, 4), "the first failure is retried at once"
    assert [str(error) for error in primary.errors] == ["MISCONF Errors writing to the AOF file"] * 5
    await writer.stop()


class SilentConnection(ScriptedConnection):
    """Never replies. Records in `waits` for how long the writer has waited when it closes the connection."""

    def __init__(self, waits: list[float]) -> None:
        super().__init__([])
        self._waits = waits
        self._sent: tuple[float, Callable[[Any], None]] | None = None

    def send(
        self, command: bytes, on_reply: Callable[[Any], None], replies: int = 1, expected_reply: bytes = b""
    ) -> None:
        del command, replies, expected_reply
        self._sent = asyncio.get_running_loop().time(), on_reply

    def close(self) -> None:
        if self._sent is not None:
            loop = asyncio.get_running_loop()
            (sent_at, on_reply), self._sent = self._sent, None
            self._waits.append(loop.time() - sent_at)
            loop.call_soon(on_reply, RedisFailure("closed"))


def test_each_attempt_without_a_reply_doubles_the_timeout() -> None:
    """So a large batch is stored, however slow Redis is."""
    waits: list[float] = []

    class SilentPrimary(ScriptedPrimary):
        async def connect(self) -> ScriptedConnection:
            return SilentConnection(waits) if len(waits) < 4 else ScriptedConnection([])

    async def write() -> None:
        stored: asyncio.Future[BatchInFlight] = asyncio.get_running_loop().create_future()
        writer = writer_of(cast("Primary", SilentPrimary([])), meta_at((7, INDEX)), stored.set_result)
        await writer.open()
        writer.write(Batch(), not_reported)
        await stored
        await writer.stop()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(write())
    # The check, which runs four times in the shortest timeout, finds no progress one interval after the sending at most.
    assert [round(wait // COMMIT_TIMEOUT_S) for wait in waits] == [1, 2, 4, 8]


async def test_a_batch_is_sent_that_follows_one_whose_connection_does_not_watch_the_log_any_more() -> None:
    """A cluster node that imports the slot rejects WATCH, and its reply may arrive as soon as the recovery has sent the batch."""
    unwatched = [b"OK", b"QUEUED", [b"7-4"], ErrorReply("MOVED 5700 127.0.0.1:2")]
    both_stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_stored(batch: BatchInFlight) -> None:
        if batch.index == INDEX + 1:
            writer._keyspace = keyspace_of(primary, meta_at((7, INDEX + 1)))
            writer.write(Batch(clock_ms=1), not_reported)
        else:
            both_stored.set_result(None)

    primary = cast("Primary", ScriptedPrimary([unwatched]))
    writer = writer_of(primary, meta_at((7, INDEX)), on_stored)
    await writer.open()
    writer.write(Batch(), not_reported)
    await soon(both_stored)
    await writer.stop()


def test_the_outcome_of_a_batch_is_reported_once() -> None:
    reported: list[BaseException | None] = []
    batch = BatchInFlight(1, Batch(), {}, b"0 1 1", 0.0, reported.append)
    batch.finish(None)
    batch.finish(LeadershipLost("the recovery failed"))
    assert reported == [None]
    assert batch.done is None, "the caller, and its state in memory, are released"


async def test_a_reply_after_the_node_has_stepped_down_is_ignored() -> None:
    stored: list[BatchInFlight] = []
    writer = writer_of(cast("Primary", ScriptedPrimary([])), meta_at((7, INDEX)), stored.append)
    await writer.open()
    writer.write(Batch(), not_reported)
    await writer.stop()
    writer._on_replies(writer.batch.expected_reply)
    assert stored == []
    assert writer.batch.state is FINISHED


OTHER_NODE = LeaderEpoch(7, "other", "{n}:state:7-other")
"""Another node that chose the same number for its epoch at a partitioned Redis."""
OLDER, NEWER = LeaderEpoch(3, "older", "{n}:state:3-older"), LeaderEpoch(9, "newer", "{n}:state:7-nonce")


@pytest.mark.parametrize(
    ("meta", "outcome"),
    [
        (meta_at((7, INDEX)), Outcome.NOT_STORED),
        (meta_at((7, INDEX + 1)), Outcome.STORED),
        (None, Outcome.ROLLED_BACK),
        (meta_at((3, 50), OLDER), Outcome.ROLLED_BACK),
        (meta_at((7, INDEX - 1)), Outcome.ROLLED_BACK),
        (meta_at((7, INDEX), has_log=False), Outcome.ROLLED_BACK),
        (meta_at((7, INDEX + 2)), Outcome.OTHER_LEADER),
        (meta_at((9, 0), NEWER), Outcome.OTHER_LEADER),
        (meta_at((7, 1), NEWER, has_log=False), Outcome.OTHER_LEADER),  # it has lost its log
        (meta_at((7, INDEX), OTHER_NODE), Outcome.OTHER_LEADER),
        (meta_at((7, INDEX + 1), OTHER_NODE), Outcome.OTHER_LEADER),
        (meta_at((7, INDEX - 1), OTHER_NODE), Outcome.OTHER_LEADER),
    ],
)
def test_the_end_of_the_log_tells_whether_the_batch_in_flight_is_stored(meta: Meta | None, outcome: Outcome) -> None:
    writer = writer_of(cast("Primary", ScriptedPrimary([])))
    writer.batch = BatchInFlight(INDEX + 1, Batch(), {}, b"0 1 1")
    assert writer._compare(meta) is outcome
