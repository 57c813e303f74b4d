"""A simulated Redis server: connections, blocking commands, injected faults and loss of writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from genie.testing.simulation.network import Listener, SimTransport
from genie.testing.simulation.redis.commands import OK, Commands, StreamRead
from genie.testing.simulation.redis.keyspace import Undo
from genie.testing.simulation.redis.resp import CommandParser, Failure, Status, encode

CUT_BEFORE = "reset before"
"""Fault of a command: the connection is reset before the command is executed."""
CUT_AFTER = "reset after"
"""Fault of a command: the connection is reset after the command is executed."""
REJECT = "reject"
"""Fault of a command: the command is not executed, and the reply is an error."""

LOADING_COMMANDS = {
    *(b"AUTH", b"CLIENT", b"CONFIG", b"HELLO", b"INFO", b"REPLCONF", b"ROLE", b"SELECT"),
    *(b"EXEC", b"MULTI", b"UNWATCH", b"WATCH"),
}
"""The commands that a Redis executes while it loads its data."""

NOT_YET = object()
"""Returned instead of a reply while a command still blocks."""


class RedisConnection(asyncio.Protocol):
    """A client's connection to Redis. Commands are executed in order, so a blocking command delays the later commands.

    The connection adds itself to `registry` while it is open.
    """

    def __init__(self, redis: SimRedis, registry: dict[RedisConnection, None]) -> None:
        self._redis = redis
        self._registry = registry
        self._parser = CommandParser()
        self._transport: SimTransport
        self.peer = ""
        """The name of the client node."""
        self._version = 2
        """The version of RESP, which the client selects by HELLO."""
        self._write_offset = 0
        """The replication offset after the last write of this connection."""
        self._watched: set[bytes] = set()
        """The keys that the client watches."""
        self._is_dirty = False
        """True if a watched key was changed, so that the next EXEC fails."""
        self._transaction: list[list[bytes]] | None = None
        """The commands since MULTI. None outside of a transaction."""
        self._is_aborted = False
        """True if a command of the transaction was rejected, so that EXEC fails."""
        self._queued_commands: list[list[bytes]] = []
        """Received commands that are not executed yet."""
        self._try_reply: Callable[[], object] | None = None
        """A function that returns the reply to the blocking command, or `NOT_YET`. None if no command blocks."""
        self._timer: asyncio.TimerHandle | None = None
        """The timeout of the blocking command."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("SimTransport", transport)
        self.peer = self._transport.connection.client.node.name
        self._registry[self] = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Forget the connection, and cancel its blocking command."""
        self._registry.pop(self, None)
        self._redis.on_disconnect(self)
        self._try_reply = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Queue the complete commands, and execute commands until one blocks."""
        self._queued_commands += self._parser.feed(data)
        self._execute_queued()

    def cut(self) -> None:
        self._transport.abort()

    def on_keys_changed(self, keys: set[bytes] | None) -> None:
        """Record that a client has changed these keys, or if `keys` is None, that all keys may have changed."""
        changed_watched = self._watched if keys is None else self._watched & keys
        if changed_watched:
            self._is_dirty = True

    def reply_if_unblocked(self) -> None:
        """Reply to the blocking command if there is one and its reply is available now."""
        if self._try_reply is not None:
            reply = self._try_reply()
            if reply is not NOT_YET:
                self._unblock(reply)

    def send_reply(self, reply: object) -> None:
        """Send a reply, in the version of RESP that the client has selected by HELLO."""
        if isinstance(reply, dict) and reply and self._version < 3:
            is_reply_to_xread = isinstance(next(iter(reply.values())), list)
            if is_reply_to_xread:  # in RESP 2 a list of pairs, while other dicts are flat lists
                reply = [list(item) for item in reply.items()]
        self._transport.write(encode(reply, self._version))

    # -- inside -------------------------------------------------------------------------------------------

    def _unblock(self, reply: object) -> None:
        """Reply to the blocking command, and execute the commands that were queued after it."""
        if self._timer is not None:
            self._timer.cancel()
        self._try_reply = self._timer = None
        self.send_reply(reply)
        self._execute_queued()

    def _execute_queued(self) -> None:
        """Execute queued commands until one blocks or the connection is closed."""
        while self._queued_commands and self._try_reply is None and not self._transport.is_closing():
            self._execute(self._queued_commands.pop(0))

    def _execute(self, command: list[bytes]) -> None:
        """Execute a command and send the reply, unless the command blocks or a fault is injected."""
        if self._redis.is_loading and command[0].upper() not in LOADING_COMMANDS:
            self._is_aborted = self._transaction is not None
            self.send_reply(Failure("LOADING Redis is loading the dataset in memory"))
            return
        if self._redis.handle_if_replication(self, command):
            return
        fault = self._redis.fault(command, self.peer)
        if fault is REJECT:
            if command[0].upper() == b"EXEC":  # a rejected EXEC discards the transaction
                self._transaction, self._is_dirty = None, False
                self._watched.clear()
            self._is_aborted = self._transaction is not None
            self.send_reply(Failure("ERR injected fault."))
        elif fault is CUT_BEFORE:
            self.cut()
        else:
            reply = self._reply_to(command)
            if fault is CUT_AFTER:
                self.cut()
            elif self._try_reply is None:
                self.send_reply(reply)

    def _reply_to(self, command: list[bytes]) -> object:
        """Execute a command and return the reply. If the command blocks, the returned None is not a reply."""
        name = command[0].upper()
        if name == b"HELLO":
            self._version = int(command[1]) if len(command) > 1 else self._version
            return {b"server": b"redis", b"version": b"7.2.0", b"proto": self._version, b"mode": b"standalone"}
        if name in (b"MULTI", b"EXEC", b"WATCH", b"UNWATCH") or self._transaction is not None:
            return self._transact(name, command)
        if name == b"XREAD":
            return self._read(command)
        if name == b"WAIT":
            return self._wait(int(command[1]), int(command[2]))
        if self._redis.scan_s and b"HSCAN" in command:  # the command itself, or the script that runs it
            self._block(lambda: NOT_YET, self._redis.scan_s * 1000, on_timeout=lambda: self._write([command])[0])
            return None
        return self._write([command])[0]

    def _transact(self, name: bytes, command: list[bytes]) -> object:
        """Execute MULTI, EXEC, WATCH or UNWATCH, or queue another command until EXEC. Return the reply.

        If a watched key was changed since WATCH, EXEC executes nothing, and its reply is None.
        """
        if name == b"WATCH":
            self._watched.update(command[1:])
        elif name == b"MULTI":
            self._transaction, self._is_aborted = [], False
        elif name == b"EXEC":
            return self._end_transaction()
        elif name == b"UNWATCH":
            self._watched.clear()
            self._is_dirty = False
        elif self._transaction is not None:
            rejection = self._redis.rejection(command)
            if rejection is not None:
                self._is_aborted = True
                return rejection
            self._transaction.append(command)
            return Status(b"QUEUED")
        return OK

    def _end_transaction(self) -> object:
        """EXEC: execute the queued commands as one atomic write, and return their replies."""
        queued, self._transaction = self._transaction or [], None
        was_aborted, was_dirty = self._is_aborted, self._is_dirty
        self._watched.clear()
        self._is_dirty = self._is_aborted = False
        if was_aborted:
            return Failure("EXECABORT Transaction discarded because of previous errors.")
        return None if was_dirty else self._write(queued)

    def _write(self, commands: list[list[bytes]]) -> list[object]:
        """Execute commands as one atomic write, and return their replies."""
        offset_before = self._redis.offset
        replies = self._redis.execute_write(commands, self.peer)
        if self._redis.offset > offset_before:
            self._write_offset = self._redis.offset
        return replies

    def _read(self, command: list[bytes]) -> object:
        """XREAD: return the newer entries, or None if there are none.

        With the option BLOCK and without newer entries, this blocks the connection, and the returned None is not a
        reply.
        """
        read = StreamRead(self._redis.keys, command)
        available = read.entries()
        if read.block_ms is not None:
            self._redis.on_blocking_read(self.peer, read)
        if available is not None:
            return available if self._version > 2 else list(available.items())
        if read.block_ms is None:
            return None

        def try_read() -> object:
            entries = read.entries()
            return NOT_YET if entries is None else entries

        self._block(try_read, read.block_ms, on_timeout=lambda: None)
        return None

    def _wait(self, replicas: int, timeout_ms: int) -> object:
        """WAIT: return how many replicas have the writes of this connection.

        If fewer than `replicas` replicas have the writes, this blocks the connection until enough have them, or until the
        timeout has passed. The returned None is then not a reply. A timeout of 0 means no timeout.
        """
        if self._redis.read_only:
            return Failure("ERR WAIT cannot be used with replica instances.")

        def try_count() -> object:
            count = self._redis.replicas_with(self._write_offset)
            return NOT_YET if count < replicas else count

        count = try_count()
        if count is not NOT_YET:
            return count
        self._block(try_count, timeout_ms, on_timeout=lambda: self._redis.replicas_with(self._write_offset))
        return None

    def _block(self, try_reply: Callable[[], object], timeout_ms: float, on_timeout: Callable[[], object]) -> None:
        """Block the connection until `try_reply` returns a reply other than `NOT_YET`.

        After `timeout_ms` milliseconds the reply is the result of `on_timeout` instead. A timeout of 0 means no
        timeout.
        """
        self._try_reply = try_reply
        if timeout_ms:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_ms / 1000, lambda: self._unblock(on_timeout()))


# -- The server --------

PORT = 6379

Fault = Callable[[list[bytes], str], str | None]
"""Returns the fault of a command, such as `CUT_BEFORE`, or None. Called with the command and the name of the node that
sent it."""


class SimRedis(Commands):
    """A simulated Redis server. `fault` is called before each command, and decides which fault is injected."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Fault = lambda _command, _sender: None
        self.on_write: Callable[[list[Undo], str], None] = lambda _undo, _sender: None
        """Called after each atomic write, with its undo information and the name of the node that sent the command."""
        self.on_blocking_read: Callable[[str, StreamRead], None] = lambda _reader, _read: None
        """Called for each XREAD with BLOCK, with the name of the node that sent the command, and the parsed command."""
        self.loaded_at = 0.0
        """When this run has loaded its data (event-loop time). Before that, it rejects most commands."""
        self.scan_s = 0.0
        """How long each call of HSCAN takes. A server reads the records of a namespace by several calls."""
        self._connections: dict[RedisConnection, None] = {}
        self._listener: Listener | None = None

    async def serve(self, host: str, port: int = PORT) -> None:
        """Accept connections at an address, as part of the running node."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: RedisConnection(self, self._connections), host, port)
        self._listener = cast("Listener", listener)

    @property
    def is_loading(self) -> bool:
        """True if this run has not loaded its data yet."""
        return asyncio.get_running_loop().time() < self.loaded_at

    def cut_all(self) -> None:
        for connection in list(self._connections):
            connection.cut()

    def restart(self, lost_writes: int = 0) -> int:
        """Simulate a restart: abort all connections, drop the cached scripts, and lose the last `lost_writes` writes.

        Returns how many writes were lost.
        """
        self.cut_all()
        self._scripts.clear()
        self.run_id, self.started_at = f"{self.run_id}'", asyncio.get_running_loop().time()
        return self.keys.undo_last_writes(lost_writes)

    def flush(self) -> None:
        """FLUSHALL: remove all keys."""
        self.keys.clear()
        self.notify_watchers(None)

    def notify_watchers(self, keys: set[bytes] | None) -> None:
        """Notify the connections that these keys were changed, or if `keys` is None, that all keys may have changed."""
        for connection in self._connections:
            connection.on_keys_changed(keys)

    def execute_write(self, commands: list[list[bytes]], sender: str = "") -> list[object]:
        """Execute commands as one atomic write, and return the replies.

        The reply to a command that fails is a `Failure`.

        If keys were changed, the change is replicated, and blocking commands that waited for it get their replies.
        """
        replies: list[object] = []
        for command in commands:
            try:
                replies.append(self.execute(command))
            except Failure as failure:
                replies.append(failure)
        effects, self._effects = self._effects, []
        undo = self.keys.end_write()
        if undo:
            self.notify_watchers({key for key, _, _ in undo})
            self.replicate(effects, sender)
            self.on_write(undo, sender)
            self.reply_if_unblocked()
        return replies

    def reply_if_unblocked(self) -> None:
        """Reply to each blocking command whose reply is available now."""
        for connection in list(self._connections):
            connection.reply_if_unblocked()

    # -- overridden by replication ------------------------------------------------------------------------

    offset = 0
    """The replication offset, which is the number of writes. A Redis without replication does not count."""

    def replicate(self, effects: list[list[bytes]], sender: str) -> None:
        """Replicate the commands of an atomic write, which `effects` lists.

        `sender` is the node that sent the command.
        """

    def replicas_with(self, offset: int) -> int:  # noqa: ARG002
        """Return how many replicas have acknowledged the writes up to an offset."""
        return 0

    def handle_if_replication(self, connection: RedisConnection, command: list[bytes]) -> bool:  # noqa: ARG002
        """Handle a command that a replica sends to its master. Return False for any other command."""
        return False

    def on_disconnect(self, connection: RedisConnection) -> None:
        """Called when a connection has ended."""
