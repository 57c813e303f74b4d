"""The write path: encode a batch as one command, send it to the primary, retry it, and wait for replicas and disks.

A batch is one call of `commit.lua` with the epoch, the nonce and the batch's index. These make the call idempotent: after a
lost reply the same bytes are sent again, to the Redis that is the primary at that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from hashlib import sha1
from typing import Any, TypeVar

from structlog.typing import FilteringBoundLogger

from genie.backoff import Backoff
from genie.core import ENDED, Request
from genie.storage.redis.connection import ErrorReply, RedisConnection, RedisFailure, encode_bulk, encode_command
from genie.storage.redis.keyspace import Keyspace, encode_counters
from genie.storage.redis.log import LogRetention
from genie.storage.redis.primary import SCRIPTS, Primary, allowing_oom
from genie.storage.redis.records import encode
from genie.storage.store import Batch
from genie.tasks import cancel_and_wait

_COMMIT = SCRIPTS.joinpath("commit.lua").read_bytes()


def _sha(script: bytes) -> bytes:
    """Return the SHA-1 of a script in hexadecimal, as EVALSHA needs it."""
    return sha1(script).hexdigest().encode()  # noqa: S324 - Redis identifies scripts by SHA-1


async def load_scripts(connection: RedisConnection) -> bytes:
    """Load the commit script into Redis, and its variant that Redis also runs while it is out of memory.

    Returns the SHA-1 of the variant; b"" if this Redis does not support it because it is older than version 7.
    """
    await connection.call("SCRIPT", "LOAD", _COMMIT)
    oom_script = allowing_oom(_COMMIT, connection)
    if oom_script is _COMMIT:
        return b""
    await connection.call("SCRIPT", "LOAD", oom_script)
    return _sha(oom_script)


# -- Encoding -----------------------------------------------------------------------------------------


class BatchEncoder:
    """Encodes the batches of one epoch as Redis commands, and numbers the batches: the first one has index 1."""

    def __init__(self, keyspace: Keyspace) -> None:
        epoch = keyspace.epoch
        keys = (keyspace.meta, epoch.records, keyspace.log)
        head = ("EVALSHA", _SHA, len(keys), *keys, epoch.number, epoch.nonce)
        self._head, self._head_length = b"".join(map(encode_bulk, head)), len(head)
        """The encoded arguments that all batches of the epoch have in common, and the number of these arguments."""
        self._retention = LogRetention()
        self.index = 0
        """The index of the last encoded batch; 0 before the first."""

    def encode(self, batch: Batch) -> bytes:
        """Encode the next batch as one RESP command: EVALSHA of `commit.lua`, whose header lists the arguments.

        Deleted ids precede written ids, each with an empty value, as `commit.lua` expects. The bytes are formatted without a generic
        encoder, because this code runs for every commit.
        """
        self.index += 1
        deleted: list[bytes] = []
        written: list[bytes] = []
        for id_, change in batch.changes.items():
            key = b"%d" % id_
            if change is None or (isinstance(change, Request) and change.state is ENDED):
                deleted.append(b"$%d\r\n%b\r\n$0\r\n\r\n" % (len(key), key))
            else:
                record = encode(change)
                written.append(b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(record), record))
        changes = b"".join(deleted) + b"".join(written)
        counters = encode_counters(self.index, batch.clock_ms, batch.next_id, batch.next_fence)
        retained = b"%d" % self._retention.add(len(changes) + len(counters), len(batch.changes))
        deleted_count = b"%d" % len(deleted)
        return b"*%d\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (
            self._head_length + 3 + 2 * len(batch.changes),
            self._head,
            len(counters),
            counters,
            len(retained),
            retained,
            len(deleted_count),
            deleted_count,
            changes,
        )


_SHA = _sha(_COMMIT)


def with_script(command: bytes, sha: bytes) -> bytes:
    """Return an encoded batch with the SHA-1 of the commit script replaced by `sha`."""
    return command.replace(_SHA, sha, 1)


# -- Acknowledgements of replicas and disks -----------------------------------------------------------

WAIT_TIMEOUTS_MS = (1_000,) * 3
"""How long each WAIT blocks for replicas, before the batch is retried on a new connection."""
WAITAOF_TIMEOUTS_MS = (10, 20, 40, 80, 160, 320, 640, 1_000, 1_000)
"""How long each WAITAOF blocks. A replica reports its fsynced offset when it receives WAITAOF, and otherwise once a second.
At the first WAITAOF the replica has not fsynced the commit yet, so the first calls are short and are repeated soon."""


class AckPolicy:
    """Which acknowledgements a commit needs: none, from replicas (WAIT), or from replicas and disks (WAITAOF).

    `replicas` is how many replicas must have the commit. With `fsync`, the primary and these replicas must have written
    the commit to disk.
    """

    def __init__(self, replicas: int, *, fsync: bool) -> None:
        self._required = [1, replicas] if fsync else [replicas]
        """The minimum of each number in a reply: to WAITAOF (primary, replicas), to WAIT (replicas)."""
        name, timeouts_ms = ("WAITAOF", WAITAOF_TIMEOUTS_MS) if fsync else ("WAIT", WAIT_TIMEOUTS_MS)
        self.commands = [encode_command([name, *self._required, timeout_ms]) for timeout_ms in timeouts_ms]
        """The encoded WAIT or WAITAOF commands, in order: each is sent only if acknowledgements were missing before."""
        is_needed = any(self._required)
        self.command = self.commands[0] if is_needed else b""
        """What is sent together with each commit; empty if no acknowledgement is needed."""
        self.replies = 2 if is_needed else 1
        """How many replies a commit followed by `command` has."""

    def unmet(self, reply: object) -> str:
        """Describe which acknowledgements are missing, for an error message; "" if the commit has all of them.

        `reply` is the reply to WAIT, the number of replicas; or to WAITAOF, the list [1 if the primary has fsynced, number
        of replicas].
        """
        if isinstance(reply, ErrorReply):
            return str(reply)
        acknowledged = reply if isinstance(reply, list) else [reply]
        if all(count >= required for count, required in zip(acknowledged, self._required, strict=True)):
            return ""
        missing = []
        if acknowledged[:-1] == [0]:  # the first number of WAITAOF
            missing.append("not on the disk of the master")
        if self._required[-1]:
            missing.append(f"confirmed by {acknowledged[-1]} of {self._required[-1]} replicas")
        return ", and ".join(missing)


# -- Sending ------------------------------------------------------------------------------------------

COMMIT_TIMEOUT_S = 2.0
"""A commit without progress for this long is retried on a new connection. The timeout is doubled after each retry, because
Redis may only be slow to execute a large batch."""
MAX_HEAD_BYTES = 128
"""An encoded batch contains the SHA-1 of its script within its first `MAX_HEAD_BYTES` bytes."""
BACKOFF_S = (0.02, 1.0)
"""The first and the longest pause between two attempts to reach Redis."""

FAILURES = (RedisFailure, OSError, TimeoutError)
"""The exceptions after which an operation on Redis is retried."""
T = TypeVar("T")


class CommitWriter:
    """Sends one batch at a time to the primary, over a separate connection, and retries the batch until its outcome is known.

    `on_reply` is called with the reply of `commit.lua`: `ok` after the batch is stored and acknowledged as `ack_policy`
    requires; or `lost`, `stale` or `other`. `on_defect` is called with an error that no retry would change.
    """

    def __init__(
        self,
        primary: Primary,
        ack_policy: AckPolicy,
        log: FilteringBoundLogger,
        on_reply: Callable[[object], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._primary = primary
        self._ack_policy = ack_policy
        self._log = log
        self._on_reply = on_reply
        self._on_defect = on_defect
        self.failure_count = 0
        """How often a batch failed because Redis was unreachable or rejected it."""
        self.full = False
        """Whether Redis is out of memory, and stores only releases."""
        self._connection: RedisConnection | None = None
        self._command = b""
        """The last encoded batch."""
        self._in_flight = False
        """Whether the outcome of the last batch is still unknown."""
        self._oom_script_sha = b""
        """The SHA-1 of the script variant that runs while Redis is out of memory; empty if unsupported."""
        self._progress_at = 0.0
        """When the batch in flight last made progress (event-loop time)."""
        self._unsent_bytes = 0
        """The size of the send buffer at the last timeout check."""
        self._ack_attempts = 0
        """How many waits for acknowledgements of the batch in flight have failed on this connection."""
        self._timeout_s = COMMIT_TIMEOUT_S
        """How long the batch in flight may be without progress; doubled after each timeout."""
        self._backoff: Backoff | None = None
        """Set during an outage of Redis; None while commits succeed."""
        self._unavailable_since = 0.0
        """When the outage began (event-loop time)."""
        self._recovery: asyncio.Task[None] | None = None
        """Runs while commits are impossible: reconnects, or restores the snapshot, and then sends a batch."""
        self._timeout_timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Connect to the primary, and start the timeout check. Raises RedisFailure, OSError or TimeoutError if connecting fails."""
        self._loop = asyncio.get_running_loop()
        self._timeout_s = COMMIT_TIMEOUT_S
        self._connection = await self._connect()
        if self._timeout_timer is None:
            self._check_timeout()

    def write(self, command: bytes) -> None:
        """Send an encoded batch, and retry it until `on_reply` or `on_defect` is called."""
        self._command, self._in_flight = command, True
        self._send()

    def recover(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that makes commits possible again, and at its end calls `resubmit`.

        If the coroutine raises an error, `on_defect` is called with that error.
        """
        self._recovery = self._loop.create_task(coroutine)
        self._recovery.add_done_callback(self._on_recovery_done)

    async def resubmit(self, command: bytes) -> None:
        """Send an encoded batch after a recovery. If there is no connection, first connect, and retry until that succeeds.

        May only be called by the coroutine that was passed to `recover`.
        """
        self._command, self._in_flight = command, True
        if self._connection is None:
            self._connection = await retry_until_done(self._connect, self._backoff or new_backoff(), self._log)
        self._send()

    async def stop(self) -> None:
        """Cancel all retries and disconnect, without calling `on_reply`. A batch in flight may or may not be stored."""
        self._in_flight, self._backoff = False, None
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
            self._timeout_timer = None
        await cancel_and_wait(self._recovery)
        self.drop()

    @property
    def connection(self) -> RedisConnection | None:
        """The connection to the primary; None while disconnected."""
        return self._connection

    def drop(self) -> None:
        """Close the connection. A batch in flight fails with RedisFailure, and is retried on a new connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self) -> None:
        """Send the batch in flight, followed by WAIT or WAITAOF if acknowledgements are required.

        Without a connection, start a recovery that connects and then sends the batch.
        """
        if self._connection is None:
            if self._recovery is None:  # a running recovery sends the batch after connecting
                self.recover(self._retry(RedisFailure("not connected")))
            return
        self._progress_at, self._ack_attempts = self._loop.time(), 0
        self._connection.send(self._command + self._ack_policy.command, self._on_commit_reply, self._ack_policy.replies)

    def _on_commit_reply(self, reply: object) -> None:
        """Handle the reply to the batch in flight: report the outcome, retry the batch, or wait for acknowledgements.

        If acknowledgements are required, `reply` is a list: the reply of the script, then the reply to WAIT or WAITAOF.
        """
        if not self._in_flight:
            return
        ack_reply: object = None
        if type(reply) is list:
            reply, ack_reply = reply
        if isinstance(reply, RedisFailure):
            self._on_failure(reply)
            return
        if reply == b"ok" and ack_reply is not None and (unmet := self._ack_policy.unmet(ack_reply)):
            self._wait_for_acks(ack_reply, unmet)
            return
        self._timeout_s = COMMIT_TIMEOUT_S
        if self._backoff is not None:
            self._backoff = None
            address = None if self._connection is None else str(self._connection.address)
            outage_ms = round((self._loop.time() - self._unavailable_since) * 1000)
            self._log.info("store available again", address=address, outage_ms=outage_ms)
        if reply == b"ok" and self.full and not self._uses_oom_script:
            self.full = False
            self._log.info("store memory available again")
        self._in_flight = False
        self._on_reply(reply)

    def _wait_for_acks(self, ack_reply: object, unmet: str) -> None:
        """Repeat WAIT or WAITAOF, because the primary has applied the batch in flight, but acknowledgements are missing.

        `ack_reply` is the last reply to WAIT or WAITAOF, `unmet` describes the missing acknowledgements.

        The batch is sent again only after the last repetition or a lost connection, because each new write would need to
        be acknowledged as well.
        """
        self._ack_attempts += 1
        commands = self._ack_policy.commands
        if self._connection is None or isinstance(ack_reply, RedisFailure) or self._ack_attempts >= len(commands):
            self._on_failure(RedisFailure(f"commit not acknowledged: {unmet}"))
            return
        self._progress_at = self._loop.time()
        self._connection.send(commands[self._ack_attempts], self._on_acks)

    def _on_acks(self, ack_reply: object) -> None:
        """Handle the reply to a repeated WAIT or WAITAOF, as if it were part of the reply to a commit that was applied."""
        connection_lost = isinstance(ack_reply, RedisFailure) and not isinstance(ack_reply, ErrorReply)
        self._on_commit_reply(ack_reply if connection_lost else [b"ok", ack_reply])

    @property
    def _uses_oom_script(self) -> bool:
        """Whether the batch in flight was sent with the script variant that runs while Redis is out of memory."""
        return bool(self._oom_script_sha) and self._oom_script_sha in self._command[:MAX_HEAD_BYTES]

    # -- failures -----------------------------------------------------------------------------------------

    def _on_failure(self, error: RedisFailure) -> None:
        """Retry a batch that Redis rejected, or whose outcome is unknown.

        If Redis is out of memory, retry at once with the script variant that Redis still accepts. Otherwise reconnect first.
        """
        out_of_memory = isinstance(error, ErrorReply) and error.code == "OOM"
        if out_of_memory and self._oom_script_sha and not self._uses_oom_script:
            if not self.full:
                self.full = True
                self._log.error("store out of memory, accepting releases only", error=str(error))
            self._command = with_script(self._command, self._oom_script_sha)
            self._send()
            return
        if self._connection is not None:
            self._primary.on_error(error, self._connection.address)
        self.drop()
        self.recover(self._retry(error))

    def _check_timeout(self) -> None:
        """Close the connection if the batch in flight makes no progress. Closing the connection triggers a retry.

        Redis makes progress while it receives more of the batch. The timeout is doubled each time.

        Runs every quarter of `COMMIT_TIMEOUT_S`, because one timer per commit would cost more (measured).
        """
        self._timeout_timer = self._loop.call_later(COMMIT_TIMEOUT_S / 4, self._check_timeout)
        if self._connection is None or not self._in_flight or self._recovery is not None:
            return
        previously_unsent, self._unsent_bytes = self._unsent_bytes, self._connection.unsent_bytes
        if self._unsent_bytes < previously_unsent:
            self._progress_at = self._loop.time()
        elif self._loop.time() - self._progress_at > self._timeout_s:
            self._timeout_s *= 2
            self.drop()

    def _on_recovery_done(self, task: asyncio.Task[None]) -> None:
        """Call `on_defect` if the recovery failed. The recovery has already retried all errors that a retry can change."""
        if self._recovery is task:
            self._recovery = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_defect(error)

    async def _connect(self) -> RedisConnection:
        """Connect to the current primary, and load the commit scripts into that Redis."""
        connection = await self._primary.connect()
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                self._oom_script_sha = await load_scripts(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _retry(self, error: RedisFailure) -> None:
        """Connect to the current primary, and send the batch in flight again.

        The first failure after a successful commit begins an outage, is logged, and is retried at once. Before every later
        attempt there is a pause.
        """
        self.failure_count += 1
        if self._backoff is None:
            self._log.warning("store unavailable, queueing commits", error=str(error))
            self._backoff, self._unavailable_since = new_backoff(), self._loop.time()
        else:  # Redis was reached, and has failed again: do not retry in a tight loop
            await asyncio.sleep(round(self._backoff.next_delay(), 3))
        await self.resubmit(self._command)


async def retry_until_done(attempt: Callable[[], Awaitable[T]], backoff: Backoff, log: FilteringBoundLogger) -> T:
    """Repeat an operation on Redis until it succeeds, with the pauses of `backoff`; return its result.

    An error is logged only if it differs from the error of the previous attempt.
    """
    last_error = ""
    while True:
        try:
            return await attempt()
        except FAILURES as error:
            if str(error) != last_error:
                last_error = str(error)
                log.warning("store still unavailable", error=last_error)
            await asyncio.sleep(round(backoff.next_delay(), 3))


def new_backoff() -> Backoff:
    """Return a new exponential backoff for attempts to reach Redis."""
    return Backoff(*BACKOFF_S)
