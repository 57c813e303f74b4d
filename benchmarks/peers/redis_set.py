"""Redis with the lock of its documentation: SET NX PX, and a script that deletes the key if it
still has our value.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.peers.peer import HOLD_MS, Pipeline, Running, Step, Wire, WirePeer, exchange, open_socket
from benchmarks.peers.redis_server import missing, redis_server

DELETE_OURS = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


def command(*words: object) -> bytes:
    """Encode a command in RESP."""
    parts = [str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


class RedisWire(Wire):
    """Retries after a random time if another connection holds the key: Redis has no queue for it."""

    def __init__(self, sock: socket.socket, key: str, number: int) -> None:
        digest = exchange(sock, command("SCRIPT", "LOAD", DELETE_OURS), lambda data: data.count(b"\n") == 2)  # noqa: PLR2004
        token = f"{number:032x}"
        super().__init__(
            sock,
            number,
            lock=command("SET", key, token, "NX", "PX", HOLD_MS),
            unlock=command("EVALSHA", digest.split()[1].decode(), 1, key, token),
        )

    def answer(self, data: bytes) -> Step:
        """See `Wire`."""
        return ANSWERS.get(data, Step.ERROR)


ANSWERS = {b"+OK\r\n": Step.LOCKED, b"$-1\r\n": Step.REFUSED, b":1\r\n": Step.UNLOCKED}


class RedisPipeline(Pipeline):
    """Redis replies in the order of the commands."""

    def __init__(self, sock: socket.socket, keys: Sequence[str], number: int) -> None:
        super().__init__(sock, number)
        wires = [RedisWire(sock, key, number) for key in keys]
        self._locks = [wire.lock for wire in wires]
        self._unlocks = [wire.unlock for wire in wires]
        self._awaited: deque[int] = deque()
        self._partial = b""

    def lock(self, key: int) -> bytes:
        """See `Pipeline`."""
        self._awaited.append(key)
        return self._locks[key]

    def unlock(self, key: int) -> bytes:
        """See `Pipeline`."""
        self._awaited.append(key)
        return self._unlocks[key]

    def read(self, data: bytes) -> Sequence[tuple[int, Step]]:
        """See `Pipeline`."""
        *replies, self._partial = (self._partial + data).split(b"\r\n")
        return [(self._awaited.popleft(), ANSWERS.get(reply + b"\r\n", Step.ERROR)) for reply in replies]


class RedisSet(WirePeer):
    """Redis, measured by its protocol."""

    name = "Redis, `SET NX PX`"
    slug = "redis-set"
    depths = frozenset({1, 16})

    def missing(self) -> str | None:
        """See `Peer`."""
        return missing()

    def running(self, folder: Path, prefix: Sequence[str]) -> AbstractContextManager[Running]:
        """See `Peer`."""
        return redis_server(folder, prefix)

    def connect(self, running: Running, key: str, number: int) -> Wire:
        """See `WirePeer`."""
        return RedisWire(open_socket(running.port), key, number)

    def pipeline(self, running: Running, keys: Sequence[str], number: int) -> Pipeline:
        """See `WirePeer`."""
        return RedisPipeline(open_socket(running.port), keys, number)
