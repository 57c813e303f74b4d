"""The interface of a peer: servers that can be started, and a way to lock and unlock a key
repeatedly.

A peer is measured in one of two ways. A `WirePeer` is measured by its protocol, with messages
encoded in advance, so that the load takes little CPU time. A `LibraryPeer` is a client library,
measured together with its server.
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
"""The lease of a lock, for peers that need one: longer than any cycle."""


class PeerFailed(Exception):
    """The peer could not be started, or has stopped replying."""


class Step(enum.Enum):
    """The meaning of a reply for a cycle."""

    WAIT = enum.auto()
    """Incomplete: the rest of the reply, or the lock, will follow without a request."""
    LOCKED = enum.auto()
    UNLOCKED = enum.auto()
    REFUSED = enum.auto()
    """Rejected: another connection holds the lock, so the client must retry."""
    ERROR = enum.auto()


class Wire(ABC):
    """A connection that locks one key, with at most one command in flight."""

    def __init__(self, sock: socket.socket, number: int, *, lock: bytes = b"", unlock: bytes = b"") -> None:
        self.sock = sock
        self.number = number
        self.lock = lock
        """The bytes that request the lock."""
        self.unlock = unlock
        """The bytes that release the lock, once it is granted."""
        self.began = 0.0
        """When the current cycle began."""
        self._rest = b""

    def read(self, data: bytes) -> Step:
        """Interpret received bytes."""
        data = self._rest + data
        if not self.complete(data):
            self._rest = data
            return Step.WAIT
        self._rest = b""
        return self.answer(data)

    def complete(self, data: bytes) -> bool:
        """Return whether a reply is complete."""
        return data.endswith(b"\n")

    @abstractmethod
    def answer(self, data: bytes) -> Step:
        """Interpret a complete reply. Sets `lock` or `unlock` if the next command depends on it."""


class Pipeline(ABC):
    """A connection with a command in flight for each of several keys. The keys are numbered."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number

    @abstractmethod
    def lock(self, key: int) -> bytes:
        """Return the bytes that request the lock of a key."""

    @abstractmethod
    def unlock(self, key: int) -> bytes:
        """Return the bytes that release the lock of a key."""

    @abstractmethod
    def read(self, data: bytes) -> Sequence[tuple[int, Step]]:
        """Interpret received bytes: the keys whose state has changed, each with the meaning of the reply."""


@dataclass(frozen=True)
class Running:
    """Running servers."""

    port: int
    pids: tuple[int, ...]
    """The ids of all processes whose CPU time counts, including that of their children."""
    versions: tuple[str, ...]
    """The version of each program."""


class Peer(ABC):
    """A lock service to measure."""

    name: str
    """Its name in the tables."""
    slug: str
    """Its name for `--only`."""
    depths: frozenset[int] = frozenset({1})
    """The numbers of requests in flight on each connection with which it is measured."""

    def missing(self) -> str | None:
        """Return why it can't be measured here; None if it can."""
        return None

    @abstractmethod
    def running(self, folder: Path, prefix: Sequence[str]) -> AbstractContextManager[Running]:
        """Start its servers for the block, with their data in an empty folder. `prefix` is put
        before each command.
        """


class WirePeer(Peer):
    """A peer that is measured by its protocol."""

    @abstractmethod
    def connect(self, running: Running, key: str, number: int) -> Wire:
        """Return a connection that is ready for its first cycle."""

    def pipeline(self, running: Running, keys: Sequence[str], number: int) -> Pipeline:
        """Return a connection for several keys. Only for peers with a depth of more than 1."""
        raise NotImplementedError


Cycle = Callable[[str], Awaitable[None]]
"""Lock a key and unlock it."""


class LibraryPeer(Peer):
    """A peer that is measured through its asyncio client."""

    batch = 1
    """How many keys a call of `Cycle` locks and unlocks."""

    @abstractmethod
    def client(self, running: Running, connections: int) -> AbstractAsyncContextManager[Cycle]:
        """Provide a function that executes a cycle, for this number of concurrent tasks."""


def open_socket(port: int) -> socket.socket:
    """Connect to a server on this machine."""
    sock = socket.create_connection((HOST, port), CONNECT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exchange(sock: socket.socket, question: bytes, complete: Callable[[bytes], bool]) -> bytes:
    """Send a message and read the complete reply; used before the first cycle."""
    sock.sendall(question)
    answer = b""
    while not complete(answer):
        data = sock.recv(65536)
        if not data:
            raise PeerFailed(f"closed the connection behind {answer[-200:]!r}")
        answer += data
    return answer
