"""The commands of Redis that Genie uses, on the keys in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha1
from typing import Any
from zlib import crc32

from genie.testing.simulation.redis.keyspace import Keyspace, Members, Stream
from genie.testing.simulation.redis.lua import script_runner
from genie.testing.simulation.redis.resp import Failure, Status


class StreamRead:
    """A parsed XREAD command: `XREAD [COUNT count] [BLOCK ms] STREAMS key ... id ...`."""

    def __init__(self, keys: Keyspace, command: list[bytes]) -> None:
        self._keys = keys
        self.count: int | None = None
        """The maximum number of entries of each stream. None without a limit."""
        self.block_ms: int | None = None
        """The time to wait for entries. None if the command does not block, 0 if it blocks without a limit."""
        position = 1
        while command[position].upper() != b"STREAMS":
            option, value = command[position].upper(), command[position + 1]
            if option == b"COUNT":
                self.count = int(value)
            elif option == b"BLOCK":
                self.block_ms = int(value)
            position += 2
        keys_and_ids = command[position + 1 :]
        key_count = len(keys_and_ids) // 2
        self.after: dict[bytes, tuple[int, int]] = {}
        """By key, the id after which the stream is read."""
        for key, id_ in zip(keys_and_ids[:key_count], keys_and_ids[key_count:], strict=True):
            if id_ == b"$":  # only entries that are added later
                stream = keys.stream(key)
                self.after[key] = (0, 0) if stream is None else stream.last
            else:
                self.after[key] = stream_id(id_, 0)

    def entries(self) -> dict[bytes, list[Any]] | None:
        """Return the newer entries of each stream in the form of a reply, or None if no stream has any."""
        entries_by_key: dict[bytes, list[Any]] = {}
        for key, after in self.after.items():
            stream = self._keys.stream(key)
            newer = [] if stream is None else [encode_entry(entry) for entry in stream.entries if entry[0] > after]
            if newer:
                entries_by_key[key] = newer[: self.count]
        return entries_by_key or None


MAX_ID_PART = 1 << 63
"""A number that no part of a stream id exceeds."""


def stream_id(text: bytes, default_sequence: int) -> tuple[int, int]:
    """Parse the id of a stream entry or a bound of a range of ids. Return its milliseconds and its sequence.

    The text is `MILLISECONDS-SEQUENCE`, `MILLISECONDS` alone, `-` (the least id) or `+` (the greatest id). With a
    leading `(` the bound is exclusive, and the next greater id is returned. `default_sequence` is the sequence if the
    text has none.
    """
    if text == b"-":
        return 0, 0
    if text == b"+":
        return MAX_ID_PART, MAX_ID_PART
    milliseconds, dash, sequence_text = text.removeprefix(b"(").partition(b"-")
    sequence = int(sequence_text) if dash else default_sequence
    if text.startswith(b"("):  # exclusive
        sequence += 1
    return int(milliseconds), sequence


def encode_entry(entry: tuple[tuple[int, int], list[bytes]]) -> list[Any]:
    """Return a stream entry in the form of a reply: the id, and the list of fields and values."""
    return [b"%d-%d" % entry[0], entry[1]]


# -- Commands --------

OK = Status(b"OK")

_WRITES = {b"DEL", b"HDEL", b"HSET", b"SADD", b"SREM", b"UNLINK", b"XADD"}
"""The commands that a read-only Redis rejects."""


class Commands:
    """The keys, the scripts and the commands of one Redis."""

    read_only = False
    """True if commands that write are rejected, as by a replica."""

    def __init__(self) -> None:
        self.keys = Keyspace()
        self.started_at = 0.0
        """When this run of Redis has started (event-loop time)."""
        self.run_id = "1"
        """Identifies this run of Redis. Each restart changes it."""
        self._scripts: dict[bytes, bytes] = {}
        """The cached scripts by SHA-1."""
        self._effects: list[list[bytes]] = []
        """The commands of the current atomic write that have changed keys, also those of scripts. They are replicated."""
        self.unknown_commands: set[bytes] = set()
        """The names of rejected commands that are not simulated. Each is a defect of the simulation, because the store
        takes the error for a failure of Redis."""

    def flush_scripts(self) -> None:
        """SCRIPT FLUSH: drop all cached scripts, so that EVALSHA fails."""
        self._scripts.clear()

    def rejection(self, command: list[bytes]) -> Failure | None:
        """Return the error with which Redis rejects a command before it executes or queues it, or None if it accepts it."""
        name = command[0].upper()
        if self._method(name) is None:
            self.unknown_commands.add(name)
            return Failure(f"ERR unknown command '{command[0].decode()}'")
        if name in _WRITES and self.read_only:
            return Failure("READONLY You can't write against a read only replica.")
        return None

    def execute(self, command: list[bytes]) -> object:
        """Execute one command and return its reply. A command that changed keys is collected for the replicas.

        Raises Failure if the command fails, is unknown, or writes although this Redis is read-only.
        """
        rejection = self.rejection(command)
        if rejection is not None:
            raise rejection
        method = self._method(command[0])
        assert method is not None
        changes_before = self.keys.pending_change_count
        reply = method(command)
        if self.keys.pending_change_count > changes_before:
            self._effects.append(command)
        return reply

    def _method(self, name: bytes) -> Callable[[list[bytes]], object] | None:
        """Return the method that executes a command, such as `do_hset` for HSET, or None if the command is unknown."""
        return getattr(self, f"do_{name.decode().lower()}", None)

    # -- of the server itself -----------------------------------------------------------------------------

    def do_auth(self, _command: list[bytes]) -> object:
        return OK

    do_client = do_select = do_auth

    def do_ping(self, _command: list[bytes]) -> object:
        return Status(b"PONG")

    def do_role(self, _command: list[bytes]) -> object:
        """ROLE: a single Redis is a master without replicas."""
        return [b"master", 0, []]

    def do_info(self, _command: list[bytes]) -> object:
        uptime_s = int(asyncio.get_running_loop().time()) - int(self.started_at)
        server = f"redis_version:7.2.0\r\nrun_id:{self.run_id}\r\nuptime_in_seconds:{uptime_s}\r\n"
        return f"# Server\r\n{server}".encode()

    def do_config(self, command: list[bytes]) -> object:
        """CONFIG GET name ...: return the values of the settings."""
        settings = {b"appendonly": b"yes", b"maxmemory": b"0", b"maxmemory-policy": b"noeviction"}
        return {name: settings[name] for name in command[2:] if name in settings}

    def do_script(self, command: list[bytes]) -> object:
        """SCRIPT FLUSH, or SCRIPT LOAD: return the SHA-1 of the script."""
        if command[1].upper() == b"FLUSH":
            self._scripts.clear()
            return OK
        sha = sha1(command[2]).hexdigest().encode()  # noqa: S324 - Redis names scripts so
        self._scripts[sha] = command[2]
        return sha

    def do_eval(self, command: list[bytes]) -> object:
        """EVAL: run a script, and cache it for EVALSHA."""
        self._scripts[sha1(command[1]).hexdigest().encode()] = command[1]  # noqa: S324
        return self._run(command[1], command)

    def do_evalsha(self, command: list[bytes]) -> object:
        """EVALSHA: run a cached script, which the command names by its SHA-1."""
        script = self._scripts.get(command[1])
        if script is None:
            raise Failure("NOSCRIPT No matching script. Please use EVAL.")
        return self._run(script, command)

    def _run(self, script: bytes, command: list[bytes]) -> object:
        """Run a script with the keys and arguments of a command: `EVAL script key-count key ... argument ...`."""
        key_count = int(command[2])
        keys, arguments = command[3 : 3 + key_count], command[3 + key_count :]
        return script_runner().run(script, keys, arguments, self.execute)

    def do_hset(self, command: list[bytes]) -> object:
        """HSET key field value ...: return how many fields are new."""
        fields, values = command[2::2], command[3::2]
        if len(fields) != len(values) or not fields:
            raise Failure("ERR wrong number of arguments for 'hset' command")
        return sum(self.keys.set_field(command[1], field, value) for field, value in zip(fields, values, strict=True))

    def do_hdel(self, command: list[bytes]) -> object:
        return sum(self.keys.remove_field(command[1], field) for field in command[2:])

    def do_hget(self, command: list[bytes]) -> object:
        return self.keys.hash(command[1]).get(command[2])

    def do_hmget(self, command: list[bytes]) -> object:
        values = self.keys.hash(command[1])
        return [values.get(field) for field in command[2:]]

    def do_hgetall(self, command: list[bytes]) -> object:
        return dict(self.keys.hash(command[1]))

    def do_hlen(self, command: list[bytes]) -> object:
        return len(self.keys.hash(command[1]))

    def do_hscan(self, command: list[bytes]) -> object:
        """HSCAN key cursor [COUNT count]: return the next cursor, 0 at the end, and some alternating fields and values.

        The fields are returned in the order of a hash value, so a scan omits no field because of changes between its calls.
        """
        values, count = self.keys.hash(command[1]), int(command[4]) if len(command) > 4 else 10
        if len(values) <= count and command[2] == b"0":
            part, rest = list(values), []
        else:
            fields = sorted((field for field in values if crc32(field) >= int(command[2])), key=crc32)
            part, rest = fields[:count], fields[count:]
        fields_and_values: list[bytes] = []
        for field in part:
            fields_and_values += field, values[field]
        return [b"%d" % (crc32(rest[0]) if rest else 0), fields_and_values]

    def do_sadd(self, command: list[bytes]) -> object:
        return sum(self.keys.set_field(command[1], member, None, kind=Members) for member in command[2:])

    def do_srem(self, command: list[bytes]) -> object:
        return sum(self.keys.remove_field(command[1], member) for member in command[2:])

    def do_smembers(self, command: list[bytes]) -> object:
        return set(self.keys.set(command[1]))

    def do_sismember(self, command: list[bytes]) -> object:
        return int(command[2] in self.keys.set(command[1]))

    def do_del(self, command: list[bytes]) -> object:
        return sum(self.keys.delete(key) for key in command[1:])

    do_unlink = do_del

    def do_exists(self, command: list[bytes]) -> object:
        return sum(key in self.keys for key in command[1:])

    def do_xadd(self, command: list[bytes]) -> object:
        """XADD key [NOMKSTREAM] [MINID [~|=] id] id field value ...

        Returns the id, or None if NOMKSTREAM is given and the stream does not exist.
        """
        key, position, min_id = command[1], 2, (0, 0)
        options = []
        while command[position].upper() in (b"NOMKSTREAM", b"MINID"):
            options.append(command[position].upper())
            if options[-1] == b"MINID":
                position += 2 if command[position + 1] in (b"~", b"=") else 1
                min_id = stream_id(command[position], 0)
            position += 1
        stream = self.keys.stream(key)
        if stream is None:
            if b"NOMKSTREAM" in options:
                return None
            stream = Stream()
            self.keys.create(key, stream)
        id_ = stream_id(command[position], 0)
        if id_ <= stream.last:
            raise Failure("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        trimmed_count = sum(entry[0] < min_id for entry in stream.entries)
        last_before, trimmed = stream.last, stream.entries[:trimmed_count]
        self.keys.record_undo(key, lambda: stream.undo(last_before, trimmed))
        stream.entries.append((id_, command[position + 1 :]))
        stream.last = id_
        del stream.entries[:trimmed_count]
        return b"%d-%d" % id_

    def do_xrange(self, command: list[bytes]) -> object:
        """XRANGE key start end [COUNT count]: return the entries in ascending order."""
        entries = self._entries_between(command[1], command[2], command[3])
        return entries[: int(command[5])] if len(command) > 4 else entries

    def do_xrevrange(self, command: list[bytes]) -> object:
        """XREVRANGE key end start [COUNT count]: return the entries in descending order."""
        entries = self._entries_between(command[1], command[3], command[2])[::-1]
        return entries[: int(command[5])] if len(command) > 4 else entries

    def _entries_between(self, key: bytes, start: bytes, end: bytes) -> list[Any]:
        """Return the entries of a stream from the id `start` to the id `end`, in the form of a reply."""
        stream = self.keys.stream(key)
        first, last = stream_id(start, 0), stream_id(end, MAX_ID_PART)
        stored = [] if stream is None else stream.entries
        return [encode_entry(entry) for entry in stored if first <= entry[0] <= last]

    def do_xlen(self, command: list[bytes]) -> object:
        stream = self.keys.stream(command[1])
        return 0 if stream is None else len(stream.entries)

    def read(self, command: list[bytes]) -> object:
        """XREAD without BLOCK: return pairs of a stream and its newer entries, or None if no stream has newer entries."""
        entries = StreamRead(self.keys, command).entries()
        return None if entries is None else [list(item) for item in entries.items()]
