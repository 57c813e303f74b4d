"""Protocols for the part of a Genie client that token selection uses; `genie.Client` implements
them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

TOKEN_PREFIX = "token/"  # noqa: S105 - a prefix of resource names
"""Prefix of the resource names of tokens."""
EXCLUSIVE_TOKEN_PREFIX = f"exclusive:{TOKEN_PREFIX}"


class Event(Protocol):
    """An `asyncio.Event` that is only read."""

    def is_set(self) -> bool:
        """True if the event is set."""


class Lock(Protocol):
    """A granted lock."""

    @property
    def id(self) -> int:
        """The id that the server has assigned to the lock."""

    @property
    def resources(self) -> tuple[str, ...]:
        """The locked resources, with their modes."""

    @property
    def lost(self) -> Event:
        """Set when the lock has ended without `release`."""

    async def release(self) -> None:
        """Release the lock. If the server can't be reached the client retries in the background."""

    def detach(self) -> int:
        """Leave the lock held after the end of the client. LockLost if it has ended."""

    async def extend(self, seconds: float) -> None:
        """Let the lock expire this many seconds from now. LockLost if it has ended."""


class LockChange(Protocol):
    """A notification: a lock on a resource was granted or has ended."""

    @property
    def resource(self) -> str:
        """The name of the resource, without a mode."""

    @property
    def state(self) -> str:
        """`locked` or `unlocked`."""

    @property
    def id(self) -> int:
        """The id of the lock."""

    @property
    def transaction(self) -> str | None:
        """The transaction that owns it."""


class LockClient(Protocol):
    """The methods of a client that a selector calls."""

    async def acquire_any(
        self,
        resources: Sequence[str],
        target: int,
        *,
        weights: Sequence[int] | None = None,
        transaction: str | None = None,
        transaction_timeout: float = 10.0,
    ) -> Lock:
        """Lock free resources atomically, in the given order, until the sum of their weights
        reaches the target.

        Insufficient if it doesn't reach it. Weights and the target are integers from 1 to 2^63-1.
        Without `weights` each resource has weight 1.
        """

    async def release(self, id: int) -> str:
        """End a lock by its id."""

    async def ping(self) -> None:
        """Wait for a reply of the server."""

    def watch(self, prefix: str) -> AsyncIterator[LockChange]:
        """Iterate over the locks held on names with this prefix, then over every change."""
