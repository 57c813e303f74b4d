"""The write path: append a batch to the log of the primary, retry it, and wait for replicas and disks.

A commit is a transaction on one connection: MULTI, XADD, EXEC, WATCH. Redis rejects the XADD if anything but this
connection has changed the log or `meta` since the last WATCH: another leader, a rollback, a resynchronization with
another primary, a lost key. So a batch is always appended directly after the last batch that this leader knows to be
stored. The WATCH of one commit protects the next commit. A checkpoint of this leader changes `meta`, so Redis rejects
the next commit, which is then sent again.

After each failure, and on each new connection, the writer watches both keys and reads the last id of the log. The id
tells whether the batch in flight was appended (its reply was lost), was not appended (it is sent again), or whether
Redis lacks earlier batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeVar

from structlog.typing import FilteringBoundLogger

from genie.backoff import Backoff
from genie.storage.redis.connection import (
    ErrorReply,
    RedisConnection,
    RedisFailure,
    describe_failure,
    encode_bulk,
    encode_command,
)
from genie.storage.redis.keyspace import Keyspace, Meta
from genie.storage.redis.log import LogRetention, Position, encode_position
from genie.storage.redis.outage import OutageLog, failed_since
from genie.storage.redis.primary import ALLOW_OOM_SHEBANG, SCRIPTS, Primary
from genie.storage.redis.records import encode_batch, encode_changes
from genie.storage.store import Batch, LeadershipLost
from genie.tasks import cancel_and_wait

_APPEND_ALLOWING_OOM = ALLOW_OOM_SHEBANG + SCRIPTS.joinpath("append.lua").read_bytes()


class Outcome(Enum):
    """The outcome of a commit, or of a comparison of the log with the batches that this leader has stored."""

    STORED = auto()
    """The log has the batch in flight."""
    NOT_STORED = auto()
    """The log ends with the last stored batch: the batch in flight can be appended."""
    ROLLED_BACK = auto()
    """Redis lacks stored batches, or everything."""
    OTHER_LEADER = auto()
    """Another node has acquired leadership."""


# -- Encoding -----------------------------------------------------------------------------------------

TRIM_INTERVAL = 128
"""Every commit whose index is a multiple of this number trims the log. Trimming costs Redis about as much as the rest
of a small commit, so not every commit does it."""

LARGE_BATCH_BYTES = 128 << 10
"""A commit of at least this size trims the log as well, so that large batches cannot exceed the retention by much."""

_MULTI, _EXEC, _UNWATCH = (encode_command([name]) for name in ("MULTI", "EXEC", "UNWATCH"))


class CommitEncoder:
    """Encodes the commits of one epoch as Redis commands."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._epoch = keyspace.epoch.number
        ends = keyspace.history.ends
        self._former_epoch, _ = ends[-2] if len(ends) > 1 else ends[-1]
        """The epoch before this one, or this one if there is none."""
        self._log, self._meta = keyspace.log, keyspace.meta
        self._retention = LogRetention()
        self.checkpoint: Position = (0, 0)
        """The checkpoint that Redis had when the log was last compared. The log may be trimmed up to this position.

        The position is read from Redis: after a failover, the new primary may lack the last checkpoint although it has
        all batches. The commit after a new checkpoint always compares, because the checkpoint changes `meta`.
        """
        self._encoded_bytes = 0
        """The size of all batches that were encoded, each counted once."""
        self._last_index = 0
        """The index of the last batch that was encoded."""
        self._watch = encode_command(["WATCH", keyspace.meta, keyspace.log])
        self._end = b"\r\n" + _EXEC + self._watch
        """The end of each commit, after the bytes of the batch."""
        self._xadd = _MULTI + b"*6\r\n" + b"".join(map(encode_bulk, ("XADD", keyspace.log, "NOMKSTREAM")))
        """The start of a commit that does not trim the log. Its XADD has 6 words: these 3, the id, `batch` and the
        batch."""
        touch = encode_command(["HSET", keyspace.meta, "nonce", keyspace.epoch.nonce])
        self.touch = _MULTI + touch + _EXEC + self._watch
        """A transaction that changes no value, after which WAIT covers everything that the log contains.

        WAIT and WAITAOF cover only writes of their own connection, and a former connection may have appended the batch.
        """

    def encode(self, index: int, batch: bytes) -> tuple[bytes, bytes]:
        """Return the transaction that commits a batch, and the bytes that Redis replies if it appends the batch.

        Every `TRIM_INTERVAL`th commit and every large commit also trim the log. The bytes are formatted without a
        generic encoder, because this code runs for every commit.
        """
        id_, size = b"%d-%d" % (self._epoch, index), len(batch)
        must_trim = index % TRIM_INTERVAL == 0 or size >= LARGE_BATCH_BYTES
        start = self._trimming_xadd(index) if must_trim else self._xadd
        if index != self._last_index:  # not a retry
            self._last_index = index
            self._encoded_bytes += size
        command = b"%b$%d\r\n%b\r\n$5\r\nbatch\r\n$%d\r\n%b%b" % (start, len(id_), id_, size, batch, self._end)
        return command, b"+OK\r\n+QUEUED\r\n*1\r\n$%d\r\n%b\r\n+OK\r\n" % (len(id_), id_)

    def _trimming_xadd(self, index: int) -> bytes:
        """Advance the log retention to `index`, and return the start of a transaction whose XADD also trims the log.

        The XADD deletes entries that the checkpoint contains and that followers need not be able to read any more.
        """
        self._retention.add_trim_point(index, self._encoded_bytes)
        first_retained = self._retention.first_retained
        # Until this leader's entries exceed a limit, those of the former leader, trimmed to the same limits, are
        # retained.
        retained = (self._epoch, first_retained) if first_retained else (self._former_epoch, 0)
        min_id = encode_position(min(self.checkpoint, retained))
        # `~`: Redis deletes only whole nodes of the stream, and at most 10,000 entries at a time.
        options = ("XADD", self._log, "NOMKSTREAM", "MINID", "~", min_id)
        return _MULTI + b"*9\r\n" + b"".join(map(encode_bulk, options))

    def encode_allowing_oom(self, index: int, batch: bytes) -> bytes:
        """Encode the commit of a batch as a script that Redis also runs while it is out of memory (Redis 7 or newer).

        To free memory, the script deletes all entries before the checkpoint, even if a follower has not read them.
        """
        previous_id, id_ = f"{self._epoch}-{index - 1}", f"{self._epoch}-{index}"
        min_id = encode_position(self.checkpoint)
        arguments = [2, self._log, self._meta, previous_id, id_, batch, min_id]  # 2 keys, and the arguments
        script = encode_command(["EVAL", _APPEND_ALLOWING_OOM, *arguments])
        return script + _UNWATCH + self._watch  # the script has changed the watched log, so the WATCH must be renewed


class CommitForm(NamedTuple):
    """The commands in which a batch is sent. The last of them is WATCH."""

    result_index: int
    """Which of the replies tells whether the batch was appended."""
    reply_count: int


TOUCHED = [0]
"""The result of `CommitEncoder.touch`: the HSET has added no field."""
TRANSACTION = CommitForm(result_index=2, reply_count=4)
"""MULTI, XADD, EXEC, WATCH."""
SCRIPT = CommitForm(result_index=0, reply_count=3)
"""EVAL, UNWATCH, WATCH. Redis accepts this form also while it is out of memory."""


# -- Acknowledgements of replicas and disks -----------------------------------------------------------

WAIT_TIMEOUTS_MS = (1_000,) * 3
"""How long each WAIT blocks for replicas, before the batch is retried on a new connection."""
WAITAOF_TIMEOUTS_MS = (10, 20, 40, 80, 160, 320, 640, 1_000, 1_000)
"""How long each WAITAOF blocks. A replica reports its fsynced offset when it receives WAITAOF, and otherwise once a
second. At the first WAITAOF the replica has not fsynced the commit yet, so the first calls are short and are repeated
soon."""


class AckPolicy:
    """Which acknowledgements a commit needs: none, from replicas (WAIT), or from replicas and disks (WAITAOF).

    `replicas` is how many replicas must have the commit. With `fsync`, the primary and these replicas must have written
    the commit to disk.
    """

    def __init__(self, replicas: int, *, fsync: bool) -> None:
        self._required = [1, replicas] if fsync else [replicas]
        """The minimum of each number in a reply: to WAITAOF [primary, replicas], or to WAIT [replicas]."""
        name, timeouts_ms = ("WAITAOF", WAITAOF_TIMEOUTS_MS) if fsync else ("WAIT", WAIT_TIMEOUTS_MS)
        self.waits = [encode_command([name, *self._required, timeout_ms]) for timeout_ms in timeouts_ms]
        """The encoded WAIT or WAITAOF commands, in order: each is sent only if the previous one was not successful."""
        self.first_wait = self.waits[0] if any(self._required) else b""
        """The first command, which is sent together with each commit. Empty if no acknowledgement is needed."""

    def missing_acks(self, reply: object) -> str:
        """Return which acknowledgements are missing, as text for an error message, or "" if the commit has all of them.

        `reply` is the reply to WAIT, which is the number of replicas, or the reply to WAITAOF, which is the list [1 if
        the primary has fsynced else 0, number of replicas].
        """
        if isinstance(reply, ErrorReply):
            return str(reply)
        acknowledged = reply if isinstance(reply, list) else [reply]
        if all(count >= required for count, required in zip(acknowledged, self._required, strict=True)):
            return ""
        *primary_acks, replica_acks = acknowledged
        required_replicas = self._required[-1]
        missing = []
        if primary_acks == [0]:
            missing.append("not on the disk of the master")
        if required_replicas:
            missing.append(f"confirmed by {replica_acks} of {required_replicas} replicas")
        return ", and ".join(missing)


# -- The batch in flight ------------------------------------------------------------------------------

COMMIT_TIMEOUT_S = 2.0
"""A commit without progress for this long is retried on a new connection. The timeout is doubled after each retry,
because Redis may only be slow to execute a large batch."""
BACKOFF_S = (0.02, 1.0)
"""The first and the longest pause between two attempts to reach Redis."""

FAILURES = (RedisFailure, OSError, TimeoutError)
"""The exceptions after which an operation on Redis is retried."""
T = TypeVar("T")


class BatchState(Enum):
    """The state of the commit of a batch."""

    PENDING = auto()
    """The batch is sent until the log has it. In the other states, replies of Redis are ignored."""
    RESTORING = auto()
    """Redis lacks earlier batches. The snapshot, which contains this batch, is being written instead."""
    FINISHED = auto()
    """The caller knows the outcome, or has stepped down and needs none."""


PENDING: Final = BatchState.PENDING
RESTORING: Final = BatchState.RESTORING
FINISHED: Final = BatchState.FINISHED


class BatchInFlight:
    """A batch that is being committed, and the state of its commit.

    `encoded` is the batch in its stored form, and `lines` are the changes in it, by id. `sent_at` is when the batch was
    first sent (event-loop time). The lease begins then. `done` is called once: with None when the batch is stored and
    acknowledged, or with an error.
    """

    state: BatchState = PENDING
    form: CommitForm = TRANSACTION
    """The form in which the batch was sent last."""
    expected_reply: bytes = b""
    """The bytes that Redis replies if it appends the batch. Empty if they are not known, for example because WAIT
    follows."""
    attempts: int = 0
    """How often the batch was sent again, or WAIT was repeated."""
    failed_waits: int = 0
    """How many waits for acknowledgements have failed on this connection."""
    ack_error: str = ""
    """Which acknowledgements were missing after the last wait. Empty if none was missing, or if no wait has ended."""
    progress: tuple[int, int] | None = None
    """The attempts and the size of the send buffer at the last timeout check. None before the first check."""
    progress_at: float = 0.0
    """When the timeout check last saw progress (event-loop time)."""
    timeouts: int = 0
    """How often the timeout check has closed the connection since the last outcome."""
    stalled_since: float | None = None
    """When the batch last made progress, if the timeout check has closed the connection and no outage was logged since."""

    # No dataclass: mypyc compiles this constructor. Attributes that most batches never change have their values in the
    # class.
    def __init__(
        self,
        index: int,
        batch: Batch,
        lines: dict[int, bytes],
        encoded: bytes,
        sent_at: float = 0.0,
        done: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.index = index
        self.batch = batch
        self.lines = lines
        self.encoded = encoded
        self.sent_at = sent_at
        self.done = done

    def finish(self, error: BaseException | None) -> None:
        """Report the outcome to the caller, unless the caller has it already."""
        done, self.state, self.done = self.done, FINISHED, None
        if done is not None:
            done(error)

    def abandon(self) -> None:
        """End the commit without reporting an outcome: Redis may or may not have the batch."""
        self.state, self.done = FINISHED, None  # keeps no reference to the caller


def _none_in_flight(counters: Batch) -> BatchInFlight:
    """Return a finished placeholder with index 0 and these counters, which precedes the first batch of an epoch."""
    batch = BatchInFlight(0, counters, lines={}, encoded=b"")
    batch.abandon()
    return batch


# -- Sending ------------------------------------------------------------------------------------------


class CommitWriter:
    """Appends one batch at a time to the log, over a connection of its own, and retries it until its outcome is known.

    `on_stored` is called when the batch in flight is stored and acknowledged as `ack_policy` requires. `on_rolled_back`
    is called if Redis lacks earlier batches. Each of the two must finish the batch or call `recover`. If another node
    leads, or a recovery fails, the writer finishes the batch with an error.
    """

    def __init__(
        self,
        primary: Primary,
        keyspace: Keyspace,
        ack_policy: AckPolicy,
        log: FilteringBoundLogger,
        outage_log: OutageLog,
        on_stored: Callable[[BatchInFlight], None],
        on_rolled_back: Callable[[BatchInFlight], None],
    ) -> None:
        # More than 16 fields: the arguments, and the states of the connection and of the recovery, which change
        # together.
        self._primary = primary
        self._keyspace = keyspace
        self._ack_policy = ack_policy
        self._log = log
        self._outage_log = outage_log
        self._on_stored = on_stored
        """Called when the batch in flight is stored and acknowledged."""
        self._on_rolled_back = on_rolled_back
        """Called if Redis lacks earlier batches."""
        self.batch = _none_in_flight(Batch())
        """The batch in flight, or else the last batch. Before the first batch of an epoch, the result of
        `_none_in_flight`."""
        self.full = False
        """True if Redis is out of memory, so that no new requests should be accepted."""
        self.connection: RedisConnection | None = None
        """The connection to the primary. None while disconnected."""
        self._encoder: CommitEncoder
        """Encodes the commits of the current epoch. Set by `start_epoch`."""
        self._watching = False
        """True if the connection watches the log, and the log ends with the last stored batch."""
        self._has_lost_state = False
        """True if Redis has lost the checkpointed state, so that the snapshot must be restored."""
        self._backoff: Backoff | None = None
        """The pauses between attempts during an outage of Redis. None while commits succeed."""
        self._recovery: asyncio.Task[None] | None = None
        """Runs while commits are impossible: reconnects, or restores the snapshot, and then sends a batch."""
        self._timeout_timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Connect to the primary, and start the timeout check.

        Raises RedisFailure, OSError or TimeoutError if connecting fails.
        """
        self._loop = asyncio.get_running_loop()
        self.connection = await self._primary.connect()
        self._watching = False
        if self._timeout_timer is None:
            self._check_timeout()

    def start_epoch(self, encoder: CommitEncoder, counters: Batch) -> None:
        """Prepare for commits in the epoch that this node has just acquired.

        `counters` are those of the loaded state.
        """
        self.batch = _none_in_flight(counters)
        self._use_encoder(encoder)

    def _use_encoder(self, encoder: CommitEncoder) -> None:
        """Encode the next commits in the epoch of `encoder`. The first of them compares the log."""
        self._encoder = encoder
        self._watching = False
        self._has_lost_state = False

    def write(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Append a batch to the log, and retry until its outcome is passed to `done`.

        The previous batch must be stored.
        """
        sent_at, lines = self._loop.time(), encode_changes(batch.changes)
        encoded = encode_batch(batch, lines)
        self.batch = BatchInFlight(self.batch.index + 1, batch, lines, encoded, sent_at, done)
        self._send()

    async def resubmit(self, encoder: CommitEncoder, counters: Batch) -> None:
        """Make the batch in flight the first batch of a new epoch, with `counters` and without changes, and commit it.

        The changes are dropped because the snapshot, which was just restored, contains them. May only be called by the
        coroutine that was passed to `recover`.
        """
        self._use_encoder(encoder)
        batch = self.batch
        batch.index, batch.batch = 1, counters
        batch.lines, batch.encoded = {}, encode_batch(counters, {})
        batch.state, batch.progress = PENDING, None
        await self.resume()

    def on_loss(self, *, has_lost_state: bool) -> None:
        """Make the next commit compare the log with the stored batches first, because Redis seems to have lost data.

        With `has_lost_state`, the outcome of the next commit is `ROLLED_BACK`, even if the log lacks no batch.
        """
        self._watching = False
        self._has_lost_state |= has_lost_state

    def recover(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine that makes commits possible again. At its end it must call `resume` or `resubmit`.

        If the coroutine raises an error, the batch in flight fails with that error.
        """
        self._recovery = self._loop.create_task(coroutine)
        self._recovery.add_done_callback(self._on_recovery_done)

    async def resume(self) -> None:
        """Compare the log with the stored batches, then send the batch in flight or report its outcome.

        Connects first if necessary, and retries until that succeeds. May only be called by the coroutine that was
        passed to `recover`.
        """
        meta = await self._watch()
        outcome = self._compare(meta)
        if self._has_lost_state and outcome is not Outcome.OTHER_LEADER:
            outcome = Outcome.ROLLED_BACK
        if meta is not None:
            self._encoder.checkpoint = meta.checkpoint.position
        self.batch.attempts += 1
        if outcome is Outcome.NOT_STORED:
            self._watching, self.batch.form = True, TRANSACTION
            self._send()
        elif outcome is Outcome.STORED:
            self._watching = True
            if not self._ack_policy.first_wait:
                self._finish(outcome)
            elif self.connection is not None:
                # WAIT covers only writes of its own connection, and another connection may have written the batch.
                self.batch.form = TRANSACTION
                self._send_with_acks(self.connection, self._encoder.touch)
        else:
            self._finish(outcome)

    async def stop(self) -> None:
        """Cancel all retries and disconnect, without an outcome. A batch in flight may or may not be stored."""
        self.batch.abandon()
        self._backoff = None
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
            self._timeout_timer = None
        await cancel_and_wait(self._recovery)
        self.drop()

    def drop(self) -> None:
        """Close the connection. A batch in flight fails with RedisFailure, and is retried on a new connection."""
        self._watching = False
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _send(self) -> None:
        """Send the batch in flight as a transaction, followed by WAIT or WAITAOF if acknowledgements are required.

        If the connection does not watch the log yet, start a recovery that then sends the batch.
        """
        connection = self.connection
        if connection is None or not self._watching:
            # A running recovery sends the batch at its end. `_on_recovery_done` may not have run yet.
            is_recovering = self._recovery is not None and not self._recovery.done()
            if not is_recovering:
                is_connected = connection is not None
                self.recover(self.resume() if is_connected else self._retry(RedisFailure("not connected to Redis")))
            return
        batch = self.batch
        command, batch.expected_reply = self._encoder.encode(batch.index, batch.encoded)
        if self._ack_policy.first_wait:
            self._send_with_acks(connection, command)
        else:
            connection.send(command, self._on_replies, TRANSACTION.reply_count, batch.expected_reply)

    def _send_with_acks(self, connection: RedisConnection, command: bytes) -> None:
        """Send the batch in flight, as `command`, followed by WAIT or WAITAOF if acknowledgements are required."""
        batch, reply_count = self.batch, self.batch.form.reply_count
        batch.failed_waits = 0
        batch.expected_reply = b""
        batch.attempts += 1
        if self._ack_policy.first_wait:
            command, reply_count = command + self._ack_policy.first_wait, reply_count + 1
        connection.send(command, self._on_replies, reply_count)

    def _on_replies(self, replies: object) -> None:
        """Handle the replies to the batch in flight: report the outcome, retry the batch, or wait for acknowledgements.

        `replies` is the expected reply, which is not parsed, or the list of the replies to each command, or a
        RedisFailure.
        """
        batch = self.batch
        if batch.state is not PENDING:
            return
        if replies is batch.expected_reply:
            if self._backoff is None and not self.full:  # nearly always: there is nothing to log
                self._on_stored(batch)
            else:
                self._finish(Outcome.STORED)
        elif isinstance(replies, RedisFailure):
            self._on_failure(replies)
        else:
            assert isinstance(replies, list)  # noqa: S101 - several replies were expected
            self._on_parsed_replies(batch, replies)

    def _on_parsed_replies(self, batch: BatchInFlight, replies: list[Any]) -> None:
        """Handle the replies to each command of the batch in flight."""
        form = batch.form
        result = replies[form.result_index]
        executed = result if isinstance(result, list) else ()  # the reply to EXEC has those to its commands
        results = (*replies[: form.result_index], result, *executed)
        error = next((reply for reply in results if isinstance(reply, ErrorReply)), None)
        if error is not None:
            self._on_failure(error)
            return
        # A cluster node that is importing the slot rejects WATCH without another ASKING. The next commit then watches
        # first.
        is_watch_rejected = isinstance(replies[form.reply_count - 1], ErrorReply)
        self._watching = not is_watch_rejected and not self._has_lost_state
        if result in (None, [None]):
            # EXEC replies nil if the log was changed since WATCH, and XADD if the log is gone: compare.
            self._watching = False
            self.recover(self.resume())
        elif result not in ([b"%d-%d" % (self._keyspace.epoch.number, batch.index)], TOUCHED):
            self._on_failure(RedisFailure("Redis did not reply to the commit with the id of its log entry"))
        elif self._ack_policy.first_wait and (missing := self._ack_policy.missing_acks(replies[-1])):
            self._wait_for_acks(replies[-1], missing)
        else:
            self._finish(Outcome.STORED)

    def _finish(self, outcome: Outcome) -> None:
        """End the outage, if there is one, and report the outcome of the batch in flight."""
        batch = self.batch
        batch.timeouts = 0
        if self._backoff is not None:
            self._backoff = None
            self._outage_log.end(None if self.connection is None else self.connection.address, self._loop.time())
        if outcome is Outcome.STORED:
            if self.full and batch.form is TRANSACTION:
                self.full = False
                self._log.info("store memory available again, accepting all commands")
            self._on_stored(batch)
        elif outcome is Outcome.ROLLED_BACK:
            batch.state = RESTORING
            self._on_rolled_back(batch)
        else:
            batch.finish(LeadershipLost(f"{self._keyspace.meta} has another leader"))

    def _wait_for_acks(self, ack_reply: object, missing: str) -> None:
        """Repeat WAIT or WAITAOF, because the primary has appended the batch in flight, but acknowledgements are missing.

        `ack_reply` is the last reply to WAIT or WAITAOF, and `missing` describes the missing acknowledgements. The batch is
        retried only after the last repetition or a lost connection, because a new write would need acknowledgements as well.
        """
        batch, waits = self.batch, self._ack_policy.waits
        batch.failed_waits += 1
        batch.ack_error = missing
        if self.connection is None or isinstance(ack_reply, RedisFailure) or batch.failed_waits >= len(waits):
            self._on_failure(RedisFailure(f"commit not acknowledged: {missing}"))
            return
        batch.attempts += 1
        self.connection.send(waits[batch.failed_waits], self._on_acks)

    def _on_acks(self, ack_reply: object) -> None:
        """Handle the reply to a repeated WAIT or WAITAOF."""
        if self.batch.state is not PENDING:
            return
        if isinstance(ack_reply, RedisFailure) and not isinstance(ack_reply, ErrorReply):  # the connection was lost
            self._on_failure(ack_reply)
        elif missing := self._ack_policy.missing_acks(ack_reply):
            self._wait_for_acks(ack_reply, missing)
        else:
            self._finish(Outcome.STORED)

    # -- comparing with the log ---------------------------------------------------------------------------

    async def _watch(self) -> Meta | None:
        """Watch the log, and return the metadata with the end of the log, or None if the namespace is empty.

        Retries until that succeeds. As for a commit, the first failure begins an outage.
        """
        backoff = self._backoff
        if backoff is None:
            try:
                return await self._connect_and_watch()
            except FAILURES as error:
                backoff = self._begin_outage(error)
        return await retry_until_done("connect", self._connect_and_watch, backoff, self._log)

    async def _connect_and_watch(self) -> Meta | None:
        """Connect if necessary, and make one attempt of `_watch`. Disconnects if the attempt fails."""
        if self.connection is None:
            self.connection = await self._primary.connect()
        connection = self.connection
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                return await self._keyspace.watch(connection)
        except BaseException as error:
            self._primary.on_error(error, connection.address)
            self.drop()
            raise

    def _compare(self, meta: Meta | None) -> Outcome:
        """Return how the end of the log in `meta` compares with the last stored batch and the batch in flight."""
        epoch = self._keyspace.epoch
        in_flight = (epoch.number, self.batch.index)
        last_stored = (epoch.number, self.batch.index - 1)
        if meta is None:
            return Outcome.ROLLED_BACK
        if (meta.epoch.number, meta.epoch.nonce) != (epoch.number, epoch.nonce):
            return Outcome.ROLLED_BACK if meta.epoch.number < epoch.number else Outcome.OTHER_LEADER
        if meta.has_log and meta.position == last_stored:
            return Outcome.NOT_STORED
        if meta.has_log and meta.position == in_flight:
            return Outcome.STORED
        # A lost or shorter log lacks stored batches. A longer one has batches that this leader has not sent.
        return Outcome.ROLLED_BACK if meta.position < in_flight else Outcome.OTHER_LEADER

    # -- failures -----------------------------------------------------------------------------------------

    def _on_failure(self, error: RedisFailure) -> None:
        """Retry a batch that Redis rejected, or whose outcome is unknown.

        If Redis is out of memory, retry at once in the form that Redis still accepts. Otherwise reconnect first.
        """
        batch, connection = self.batch, self.connection
        is_out_of_memory = isinstance(error, ErrorReply) and error.code == "OOM"
        if is_out_of_memory and batch.form is TRANSACTION and connection is not None and connection.version >= (7, 0):
            if not self.full:
                self.full = True
                self._log.error(
                    "store out of memory, accepting releases only", address=str(connection.address), reason=str(error)
                )
            batch.form = SCRIPT
            self._send_with_acks(connection, self._encoder.encode_allowing_oom(batch.index, batch.encoded))
            return
        if connection is not None:
            self._primary.on_error(error, connection.address)
        self.drop()
        self.recover(self._retry(error))

    def _check_timeout(self) -> None:
        """Close the connection if the batch in flight makes no progress. Closing the connection triggers a retry.

        While Redis receives more of the batch, that is progress. Each closed connection doubles the timeout. The check
        repeats itself every quarter of `COMMIT_TIMEOUT_S`, because one timer per commit would cost more (measured).
        """
        self._timeout_timer = self._loop.call_later(COMMIT_TIMEOUT_S / 4, self._check_timeout)
        batch = self.batch
        if self.connection is None or batch.state is not PENDING or self._recovery is not None:
            return  # a recovery has timeouts of its own
        now, progress = self._loop.time(), (batch.attempts, self.connection.unsent_bytes)
        if progress != batch.progress:
            batch.progress, batch.progress_at = progress, now
        elif now - batch.progress_at > COMMIT_TIMEOUT_S * 2**batch.timeouts:
            batch.timeouts += 1
            batch.stalled_since = batch.progress_at
            self.drop()

    def _on_recovery_done(self, task: asyncio.Task[None]) -> None:
        """Fail the batch in flight if the recovery failed.

        A recovery fails only with errors that a retry cannot change.
        """
        if self._recovery is task:
            self._recovery = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.batch.finish(error)

    async def _retry(self, error: RedisFailure) -> None:
        """Connect to the current primary, and resume the batch in flight, which has failed with `error`.

        The first failure after a successful commit begins an outage, is logged, and is retried at once. Before every
        later attempt there is a pause.
        """
        if self._backoff is None:
            self._begin_outage(error)
        else:  # Redis was reached, and has failed again: do not retry in a tight loop
            self._outage_log.failure_count += 1
            await asyncio.sleep(round(self._backoff.next_delay(), 3))
        await self.resume()

    def _begin_outage(self, error: BaseException) -> Backoff:
        """Log the first failure after a successful commit, and return the backoff for the attempts to reach Redis."""
        now, stalled_since = self._loop.time(), self.batch.stalled_since
        self.batch.stalled_since = None
        since = failed_since(error, now) if stalled_since is None else stalled_since
        self._outage_log.on_failure(error, now, since, leads=True)
        self._backoff = new_backoff()
        return self._backoff


async def retry_until_done(
    operation: str, attempt: Callable[[], Awaitable[T]], backoff: Backoff, log: FilteringBoundLogger
) -> T:
    """Repeat `attempt` until it succeeds, and return its result. `backoff` determines the pauses.

    An error is logged with the name of the operation, but only if it differs from the error of the previous attempt.
    """
    last_error = ""
    while True:
        try:
            return await attempt()
        except FAILURES as error:
            text = describe_failure(error)
            if text != last_error:
                last_error = text
                log.warning("store operation failed, retrying", operation=operation, reason=last_error)
        # Not in the handler: compiled by mypyc, a coroutine that is closed there can overwrite memory beyond `None`.
        await asyncio.sleep(round(backoff.next_delay(), 3))


def new_backoff() -> Backoff:
    """Return a new exponential backoff for attempts to reach Redis."""
    return Backoff(*BACKOFF_S)
