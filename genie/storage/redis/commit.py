"""The write path: encode a batch as one command, send it to the primary, retry it, and wait for replicas and disks.

A batch is one call of `commit.lua`, which names the epoch, the nonce and the batch's index. That makes it idempotent: after a
lost reply the same bytes are sent again, to whichever Redis is the primary then.
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
    return sha1(script).hexdigest().encode()  # noqa: S324 - Redis identifies scripts by SHA-1


async def load_scripts(connection: RedisConnection) -> bytes:
    """Load the commit script, and its variant that runs while Redis is out of memory; return the variant's SHA-1.

    Return b"" if this Redis does not support the variant: it is older than version 7.
    """
    await connection.call("SCRIPT", "LOAD", _COMMIT)
    oom_script = allowing_oom(_COMMIT, connection)
    if oom_script is _COMMIT:
        return b""
    await connection.call("SCRIPT", "LOAD", oom_script)
    return _sha(oom_script)


# -- Encoding -----------------------------------------------------------------------------------------


class BatchEncoder:
    """Encodes the batches of one epoch, and numbers them from 1 (their `index`)."""

    def __init__(self, keyspace: Keyspace) -> None:
        epoch = keyspace.epoch
        keys = (keyspace.meta, epoch.records, keyspace.log)
        head = ("EVALSHA", _SHA, len(keys), *keys, epoch.number, epoch.nonce)
        self._head, self._head_length = b"".join(map(encode_bulk, head)), len(head)
        self._retention = LogRetention()
        self.index = 0
        """The index of the last batch."""

    def encode(self, batch: Batch) -> bytes:
        """Encode the next batch as one RESP command: EVALSHA of `commit.lua`, whose header lists the arguments.

        The bytes are formatted here without a generic encoder, because every commit of the leader passes through.
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
    """Return an encoded batch that runs the script with another SHA-1."""
    return command.replace(_SHA, sha, 1)


# -- Acknowledgements of replicas and disks -----------------------------------------------------------

WAIT_TIMEOUTS_MS = (1_000,) * 3
"""How long each WAIT blocks for replicas, before the batch is retried on a new connection."""
WAITAOF_TIMEOUTS_MS = (10, 20, 40, 80, 160, 320, 640, 1_000, 1_000)
"""How long each WAITAOF blocks. Short ones first: a replica reports what it has fsynced when it is asked, and then once a
second; at the first request the commit is not on its disk yet."""


class AckPolicy:
    """Which acknowledgements a commit needs: none, of replicas (WAIT), or of disks as well (WAITAOF).

    `replicas` must have the commit. With `fsync` it must be on their disks and on that of the primary.
    """

    def __init__(self, replicas: int, *, fsync: bool) -> None:
        self._required = [1, replicas] if fsync else [replicas]
        name, timeouts_ms = ("WAITAOF", WAITAOF_TIMEOUTS_MS) if fsync else ("WAIT", WAIT_TIMEOUTS_MS)
        self.commands = [encode_command([name, *self._required, timeout_ms]) for timeout_ms in timeouts_ms]
        """The first is sent together with the commit, the others one by one while acknowledgements are missing."""
        needed = any(self._required)
        self.command = self.commands[0] if needed else b""
        self.replies = 2 if needed else 1

    def unmet(self, reply: object) -> str:
        """Describe the acknowledgements that are missing by the reply to `command`; empty if none is.

        WAIT replies with the number of replicas; WAITAOF with a list: 1 if the primary has fsynced, the number of replicas.
        """
        if isinstance(reply, ErrorReply):
            return str(reply)
        acknowledged = reply if isinstance(reply, list) else [reply]
        if all(count >= required for count, required in zip(acknowledged, self._required, strict=True)):
            return ""
        disk = [] if len(acknowledged) == 1 or acknowledged[0] else ["not on the disk of the master"]
        replicas = [f"confirmed by {acknowledged[-1]} of {self._required[-1]} replicas"] if self._required[-1] else []
        return ", and ".join(disk + replicas)


# -- Sending ------------------------------------------------------------------------------------------

COMMIT_TIMEOUT_S = 2.0
"""A commit without progress for this long is retried on a new connection. Doubled each time: Redis may only be slow with a
large batch."""
MAX_HEAD_BYTES = 128
"""The SHA-1 of the script is within this many bytes from the start of an encoded batch."""
BACKOFF_S = (0.02, 1.0)
"""The first and the longest pause between two attempts to reach Redis."""

FAILURES = (RedisFailure, OSError, TimeoutError)
"""The exceptions after which an operation on Redis is retried."""
T = TypeVar("T")


class CommitWriter:
    """Sends one batch at a time to the primary, over a connection of its own, until its outcome is known.

    `on_reply` gets the script's reply: `ok` once the batch is stored as `ack_policy` requires, or `lost`, `stale`, `other`.
    `on_defect` gets an error that no retry would change.
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
        self._in_flight = False
        self._oom_script_sha = b""
        """The SHA-1 of the script variant that runs while Redis is out of memory; empty if unsupported."""
        self._progress_at = 0.0
        """When the batch in flight was last seen to make progress (event-loop time)."""
        self._unsent_bytes = 0
        self._ack_attempts = 0
        """How many waits for acknowledgements of the batch in flight have failed on this connection."""
        self._timeout_s = COMMIT_TIMEOUT_S
        self._backoff: Backoff | None = None
        """Set while Redis is unavailable, until a commit succeeds."""
        self._unavailable_since = 0.0
        self._recovery: asyncio.Task[None] | None = None
        self._timeout_timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Connect. RedisFailure, OSError or TimeoutError where that fails."""
        self._loop = asyncio.get_running_loop()
        self._timeout_s = COMMIT_TIMEOUT_S
        self._connection = await self._connect()
        if self._timeout_timer is None:
            self._check_timeout()

    def write(self, command: bytes) -> None:
        """Send an encoded batch, and retry it until its outcome is known."""
        self._command, self._in_flight = command, True
        self._send()

    def recover(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that makes commits possible again; its errors go to `on_defect`. It must call `resubmit`."""
        self._recovery = self._loop.create_task(coroutine)
        self._recovery.add_done_callback(self._on_recovery_done)

    async def resubmit(self, command: bytes) -> None:
        """Send an encoded batch from within a coroutine passed to `recover`, connecting first if necessary."""
        self._command, self._in_flight = command, True
        if self._connection is None:
            self._connection = await retry_until_done(self._connect, self._backoff or new_backoff(), self._log)
        self._send()

    async def stop(self) -> None:
        """Stop sending and disconnect. Whether a batch in flight is stored remains unknown."""
        self._in_flight, self._backoff = False, None
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
            self._timeout_timer = None
        await cancel_and_wait(self._recovery)
        self.drop()

    @property
    def connection(self) -> RedisConnection | None:
        """The current connection, if there is one."""
        return self._connection

    def drop(self) -> None:
        """Close the connection. A command in flight fails with RedisFailure, and is retried on the next connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self) -> None:
        """Send the batch in flight, followed by WAIT or WAITAOF if acknowledgements are required."""
        if self._connection is None:
            if self._recovery is None:  # else the recovery connects, and then sends the batch
                self.recover(self._retry(RedisFailure("not connected")))
            return
        self._progress_at, self._ack_attempts = self._loop.time(), 0
        self._connection.send(self._command + self._ack_policy.command, self._on_commit_reply, self._ack_policy.replies)

    def _on_commit_reply(self, reply: object) -> None:
        """Handle the reply to the batch in flight: report its outcome, retry it, or wait for acknowledgements.

        Where acknowledgements are required, `reply` is a list: the reply of the script, and that of WAIT or WAITAOF.
        """
        if not self._in_flight:
            return
        acknowledged: object = None
        if type(reply) is list:
            reply, acknowledged = reply
        if isinstance(reply, RedisFailure):
            self._on_failure(reply)
            return
        if reply == b"ok" and acknowledged is not None and (unmet := self._ack_policy.unmet(acknowledged)):
            self._wait_for_acks(acknowledged, unmet)
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

    def _wait_for_acks(self, acknowledged: object, unmet: str) -> None:
        """Repeat WAIT or WAITAOF for the batch in flight, which the primary has applied but too few replicas have.

        The batch itself is not sent again: that would be one more write to acknowledge.
        """
        self._ack_attempts += 1
        commands = self._ack_policy.commands
        if self._connection is None or isinstance(acknowledged, RedisFailure) or self._ack_attempts >= len(commands):
            self._on_failure(RedisFailure(f"commit not acknowledged: {unmet}"))
            return
        self._progress_at = self._loop.time()
        self._connection.send(commands[self._ack_attempts], self._on_acks)

    def _on_acks(self, acknowledged: object) -> None:
        """Handle the reply to a repeated WAIT or WAITAOF like the one to the commit, which the primary has applied."""
        connection_lost = isinstance(acknowledged, RedisFailure) and not isinstance(acknowledged, ErrorReply)
        self._on_commit_reply(acknowledged if connection_lost else [b"ok", acknowledged])

    @property
    def _uses_oom_script(self) -> bool:
        """Whether the batch in flight was sent with the script variant that runs while Redis is out of memory."""
        return bool(self._oom_script_sha) and self._oom_script_sha in self._command[:MAX_HEAD_BYTES]

    # -- failures -----------------------------------------------------------------------------------------

    def _on_failure(self, error: RedisFailure) -> None:
        """Handle a batch that was rejected, or whose outcome is unknown: retry it, with another script if out of memory."""
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
        """Close a connection on which the commit in flight makes no progress; its failure triggers a retry.

        Runs at regular intervals: one timer per commit would cost more (measured).
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
        """Report the error of a recovery, if any: recoveries retry by themselves, so an error is final."""
        if self._recovery is task:
            self._recovery = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_defect(error)

    async def _connect(self) -> RedisConnection:
        """Connect to the current primary, and load the commit scripts there."""
        connection = await self._primary.connect()
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                self._oom_script_sha = await load_scripts(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _retry(self, error: RedisFailure) -> None:
        """Send the batch in flight again, to the current primary. Log if this begins an outage."""
        self.failure_count += 1
        if self._backoff is None:
            self._log.warning("store unavailable, queueing commits", error=str(error))
            self._backoff, self._unavailable_since = new_backoff(), self._loop.time()
        else:  # Redis was reached, and has rejected the batch again
            await asyncio.sleep(round(self._backoff.next_delay(), 3))
        await self.resubmit(self._command)


async def retry_until_done(attempt: Callable[[], Awaitable[T]], backoff: Backoff, log: FilteringBoundLogger) -> T:
    """Repeat an operation on Redis, with pauses, until it succeeds. Log an error unless it is the same as the last."""
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
    """Return the backoff between attempts to reach Redis."""
    return Backoff(*BACKOFF_S)
