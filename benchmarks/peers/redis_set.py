"""Redis with the lock of its documentation: SET NX PX, and a script that deletes the key if it
still has our value.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.peers.peer import HOLD_MS, Running, Step, Wire, WirePeer, exchange, open_socket
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


class RedisSet(WirePeer):
    """Redis, measured by its protocol."""

    name = "Redis, `SET NX PX`"
    slug = "redis-set"

    def missing(self) -> str | None:
        """See `Peer`."""
        return missing()

    def running(self, folder: Path, prefix: Sequence[str]) -> AbstractContextManager[Running]:
        """See `Peer`."""
        return redis_server(folder, prefix)

    def connect(self, running: Running, key: str, number: int) -> Wire:
        """See `WirePeer`."""
        return RedisWire(open_socket(running.port), key, number)
