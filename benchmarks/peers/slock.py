"""slock: a lock server in Go, with its binary protocol."""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.peer import HOLD_MS, HOST, Pipeline, Running, Step, Wire, WirePeer, exchange, open_socket
from benchmarks.peers.processes import accepts, free_port, serving

COMMAND = struct.Struct("<BBB16sBB16s16sHHHHHB")
"""Magic, version, command, request id, flag, database, lock id, key, timeout and its flags, expiry and its flags, count,
count of reentrant locks. Times are seconds. A reply has the same length."""
MAGIC, VERSION, LOCK, UNLOCK = 0x56, 1, 1, 2
WAIT_S = 60
COMMAND_AT, REQUEST_AT, RESULT_AT = 2, slice(3, 19), 19
"""Where the fields are in a reply."""


def encode(command: int, connection: int, number: int, key: str) -> bytes:
    """Encode a command. The request id contains the number of the key on this connection."""
    id_ = struct.pack("<QQ", connection + 1, number)
    name = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return COMMAND.pack(MAGIC, VERSION, command, id_, 0, 0, id_, name, WAIT_S, 0, HOLD_MS // 1000, 0, 0, 0)


class SlockWire(Wire):
    """The server replies to a waiting request when it is granted."""

    def __init__(self, sock: socket.socket, key: str, number: int) -> None:
        super().__init__(sock, number, lock=encode(LOCK, number, 0, key), unlock=encode(UNLOCK, number, 0, key))

    def complete(self, data: bytes) -> bool:
        """See `Wire`."""
        return len(data) >= COMMAND.size

    def answer(self, data: bytes) -> Step:
        """See `Wire`."""
        return _step(data)


class SlockPipeline(Pipeline):
    """A reply has the id of its request."""

    def __init__(self, sock: socket.socket, keys: Sequence[str], number: int) -> None:
        super().__init__(sock, number)
        self._locks = [encode(LOCK, number, index, key) for index, key in enumerate(keys)]
        self._unlocks = [encode(UNLOCK, number, index, key) for index, key in enumerate(keys)]
        self._partial = b""

    def lock(self, key: int) -> bytes:
        """See `Pipeline`."""
        return self._locks[key]

    def unlock(self, key: int) -> bytes:
        """See `Pipeline`."""
        return self._unlocks[key]

    def read(self, data: bytes) -> Sequence[tuple[int, Step]]:
        """See `Pipeline`."""
        data = self._partial + data
        end = len(data) - len(data) % COMMAND.size
        self._partial = data[end:]
        replies = [data[start : start + COMMAND.size] for start in range(0, end, COMMAND.size)]
        return [(struct.unpack("<QQ", reply[REQUEST_AT])[1], _step(reply)) for reply in replies]


def _version(port: int) -> str:
    """Ask the server for its version. It also understands commands of Redis."""
    with open_socket(port) as sock:
        found = re.search(rb"version:([\d.]+)", exchange(sock, b"*1\r\n$4\r\nINFO\r\n", lambda data: b"state:" in data))
    return found[1].decode() if found else "of an unknown version"


def _step(reply: bytes) -> Step:
    if reply[RESULT_AT]:
        return Step.ERROR
    return Step.LOCKED if reply[COMMAND_AT] == LOCK else Step.UNLOCKED


class Slock(WirePeer):
    """A server with default settings."""

    name = "slock"
    slug = "slock"
    depths = frozenset({1, 16})

    def missing(self) -> str | None:
        """See `Peer`."""
        if shutil.which("slock") is None:
            return "slock is not installed: `go install github.com/snower/slock@latest`, and add its folder to PATH"
        return None

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        port = free_port()
        command = [*prefix, "slock", "--bind", HOST, "--port", str(port), "--data_dir", str(folder), "--log", "-"]
        with serving(command, folder / "slock.log", lambda: accepts(port)) as pid:
            yield Running(port, (pid,), (f"slock {_version(port)}",))

    def connect(self, running: Running, key: str, number: int) -> Wire:
        """See `WirePeer`."""
        return SlockWire(open_socket(running.port), key, number)

    def pipeline(self, running: Running, keys: Sequence[str], number: int) -> Pipeline:
        """See `WirePeer`."""
        return SlockPipeline(open_socket(running.port), keys, number)
