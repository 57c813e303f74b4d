"""What a peer is: servers that can be started, and a way to take one lock and give it back again and again.

A peer is measured in one of two ways. A `WirePeer` speaks its protocol with bytes made by hand, so that as little as
possible is spent on the side of the load. A `LibraryPeer` is a client library, measured together with its server.
"""

from __future__ import annotations

import enum
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
CONNECT_S = 10.0
HOLD_MS = 10_000
"""For how long a lock is taken where the peer wants to know: longer than any cycle."""


class PeerFailed(Exception):
    """The peer could not be started, or did not go on."""


class Step(enum.Enum):
    """What an answer means for a cycle."""

    WAIT = enum.auto()
    """Nothing yet: the rest of the answer, or the lock, comes by itself."""
    LOCKED = enum.auto()
    UNLOCKED = enum.auto()
    REFUSED = enum.auto()
    """Somebody else holds it, and the client has to ask again."""
    ERROR = enum.auto()


class Wire(ABC):
    """A connection that locks one key, with at most one command under way."""

    def __init__(self, sock: socket.socket, number: int, *, lock: bytes = b"", unlock: bytes = b"") -> None:
        self.sock = sock
        self.number = number
        self.lock = lock
        """What is sent to ask for the key."""
        self.unlock = unlock
        """What is sent to give it back, once it is locked."""
        self.began = 0.0
        """When its cycle began."""
        self._rest = b""

    def read(self, data: bytes) -> Step:
        """What the bytes that came mean."""
        data = self._rest + data
        if not self.complete(data):
            self._rest = data
            return Step.WAIT
        self._rest = b""
        return self.answer(data)

    def complete(self, data: bytes) -> bool:
        """Does an answer end here?"""
        return data.endswith(b"\n")

    @abstractmethod
    def answer(self, data: bytes) -> Step:
        """What a whole answer means. Sets `lock` or `unlock` where the next one depends on it."""


@dataclass(frozen=True)
class Running:
    """Servers that run."""

    port: int
    pids: tuple[int, ...]
    """Of all processes whose CPU counts; those that they started count, too."""
    versions: tuple[str, ...]
    """Of each program that takes part."""


class Peer(ABC):
    """Something that locks."""

    name: str
    """As the tables show it."""
    slug: str
    """As `--only` takes it."""

    def missing(self) -> str | None:
        """Why it can't be measured here, or None if it can."""
        return None

    @abstractmethod
    def running(self, folder: Path, prefix: Sequence[str]) -> AbstractContextManager[Running]:
        """Start its servers with their data in an empty folder, and end them. `prefix` goes before each command."""


class WirePeer(Peer):
    """Measured by its protocol."""

    @abstractmethod
    def connect(self, running: Running, key: str, number: int) -> Wire:
        """A connection that is ready for its first cycle."""


Cycle = Callable[[str], Awaitable[None]]
"""Lock a key and unlock it."""


class LibraryPeer(Peer):
    """Measured through its client for asyncio."""

    @abstractmethod
    def client(self, running: Running, connections: int) -> AbstractAsyncContextManager[Cycle]:
        """What does a cycle, for so many tasks at once."""


def open_socket(port: int) -> socket.socket:
    """A connection to a server on this machine."""
    sock = socket.create_connection((HOST, port), CONNECT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exchange(sock: socket.socket, question: bytes, complete: Callable[[bytes], bool]) -> bytes:
    """Send something and read until the answer is complete: for what comes before the first cycle."""
    sock.sendall(question)
    answer = b""
    while not complete(answer):
        data = sock.recv(65536)
        if not data:
            raise PeerFailed(f"closed the connection behind {answer[-200:]!r}")
        answer += data
    return answer
