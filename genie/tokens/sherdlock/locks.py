"""What is asked of a Genie client, as far as tokens are concerned: `genie.Client` can do it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

TOKEN = "token/"  # noqa: S105 - the prefix of a name
"""What the names of tokens' locks begin with."""
EXCLUSIVE_TOKEN = f"exclusive:{TOKEN}"


class Event(Protocol):
    """`asyncio.Event`, read only."""

    def is_set(self) -> bool:
        """Whether it has happened."""


class Lock(Protocol):
    """A lock that was granted."""

    @property
    def id(self) -> int:
        """The server's number for it."""

    @property
    def resources(self) -> tuple[str, ...]:
        """What it holds."""

    @property
    def lost(self) -> Event:
        """Set when it ended without `release`."""

    async def release(self) -> None:
        """Give it back; what can't be done at once goes on in the background."""

    async def extend(self, seconds: float) -> None:
        """Let it end that many seconds from now; LockLost where it has ended."""


class LockChange(Protocol):
    """A lock on one name was taken or given back."""

    @property
    def resource(self) -> str:
        """The name, without a mode."""

    @property
    def state(self) -> str:
        """`locked` or `unlocked`."""

    @property
    def id(self) -> int:
        """The lock's."""

    @property
    def transaction(self) -> str | None:
        """Whose it is."""


class Client(Protocol):
    """What a selector asks of Genie."""

    async def acquire_any(
        self,
        resources: Sequence[str],
        target: int,
        *,
        weights: Sequence[int] | None = None,
        transaction: str | None = None,
        transaction_timeout: float = 10.0,
    ) -> Lock:
        """Lock in one step, in the order given, what is free until the weights reach the target; Insufficient.

        Weights and the target are integers from 1 to 2^63-1, and are never rounded. Without `weights` each counts 1.
        """

    async def acquire(self, *resources: str, transaction: str | None = None, transaction_timeout: float = 10.0) -> Lock:
        """Lock all of them."""

    async def release(self, id: int) -> str:
        """End a lock by its id."""

    async def ping(self) -> None:
        """Return when the server has answered."""

    def watch(self, prefix: str) -> AsyncIterator[LockChange]:
        """What is held on names that begin so, and then every change."""
