"""What a simulated network leaves to chance, and who looks on."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from genie.testing.transport import Connection, SimTransport


class Observer(Protocol):
    """Sees all bytes: when they are handed to a transport, and when a protocol gets them."""

    def opened(self, connection: Connection) -> None:
        """A connection was made."""

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """A process has written this."""

    def got(self, transport: SimTransport, data: bytes) -> None:
        """A process is about to be given this."""

    def closed(self, transport: SimTransport, how: str) -> None:
        """A process has ended its side (`close`, `abort`, `kill`), or has learnt of its end (`end`, `reset`)."""


class Silent:
    """An observer that looks away."""

    def opened(self, connection: Connection) -> None:
        """Look away."""

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """Look away."""

    def got(self, transport: SimTransport, data: bytes) -> None:
        """Look away."""

    def closed(self, transport: SimTransport, how: str) -> None:
        """Look away."""


class Delays:
    """How long things take on a network, in seconds. This one takes no time at all and breaks nothing up."""

    def one_way(self) -> float:
        """From one host to another."""
        return 0.0

    def cut_at(self, size: int) -> int:
        """How many of so many bytes arrive in the first piece."""
        return size

    def loses_unread(self) -> bool:
        """Whether a reset overtakes what was sent before it."""
        return False


class RandomDelays(Delays):
    """Mostly quick, sometimes slow, rarely very slow."""

    def __init__(self, random: Random, *, slow: float = 0.02, slow_s: float = 0.2) -> None:
        self.random = random
        self.slow = slow
        self.slow_s = slow_s
        self.fault_free = False

    def one_way(self) -> float:
        """From 50 µs on."""
        if self.random.random() < self.slow:
            return self.random.uniform(0.001, self.slow_s)
        return self.random.uniform(0.00005, 0.0008)

    def cut_at(self, size: int) -> int:
        """Anywhere, once in eight times."""
        return self.random.randint(1, size) if self.random.random() < 0.125 else size

    def loses_unread(self) -> bool:
        """Every other time."""
        return self.random.random() < 0.5
