"""A client that uses the library: one lock at a time. It counts the errors that are raised."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import genie
from faults.checker import Checker, Grant, locks_of
from faults.connection import Address

QUEUE_TIMEOUT_S = 300.0


class LibraryClient:
    """Uses one `genie.Client`, which connects with the first lock."""

    def __init__(self, name: str, addresses: list[Address], checker: Checker, seed: str) -> None:
        self.name = name
        self.secret = f"the secret of {name} in {seed}"
        self._addresses = [f"{host}:{port}" for host, port in addresses]
        self._checker = checker
        self._activity = "nothing"
        self._client: genie.Client | None = None
        self._stack = AsyncExitStack()
        self._lock: genie.Lock | None = None
        self._grant: Grant | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self._activity}"

    async def lock(self, keys: tuple[str, ...], hold_ms: int) -> Grant | None:
        """Wait for a lock; None if it timed out before this client was notified."""
        self._activity = f"waits for {keys}"
        while True:
            sent_at = time.monotonic()
            try:
                client = await self._connect()
                self._lock = lock = await client.acquire(
                    *locks_of(keys), queue_timeout=QUEUE_TIMEOUT_S, transaction_timeout=hold_ms / 1000
                )
            except genie.TransactionTimeout:
                return None
            except (genie.Unavailable, genie.ConnectionLost) as error:
                self._record_error(error)
                continue
            except genie.GenieError as error:
                self._checker.violate(f"{self}: {type(error).__name__} {error}")
                return None
            self._activity = f"holds {lock.id}"
            self._grant = grant = Grant(self.name, lock.id, lock.fence, keys, sent_at + hold_ms / 1000)
            self._checker.record_id(self.name, str(lock.id), lock.id)
            self._checker.granted(grant, connected_at=None, is_repetition=False)
            return grant

    async def extend(self, hold_ms: int) -> None:
        """Extend the lock, if the connection permits."""
        assert self._lock is not None
        assert self._grant is not None
        started_at = time.monotonic()
        try:
            await self._lock.extend(hold_ms / 1000)
        except (genie.Unavailable, genie.ConnectionLost) as error:
            self._record_error(error)
        except genie.LockLost as error:
            if self._grant.certain:
                self._checker.violate(f"{self}: {error}")
        else:
            self._grant.certain_until = started_at + hold_ms / 1000

    async def release(self) -> str:
        """Release the lock; return the reason of its end."""
        assert self._lock is not None
        self._activity = f"releases {self._lock.id}"
        while True:
            try:
                await self._lock.release()
            except (genie.Unavailable, genie.ConnectionLost) as error:
                self._record_error(error)
                break  # the library continues in the background
            except genie.GenieError as error:
                self._checker.violate(f"{self}: {type(error).__name__} {error}")
            break
        self._activity = "nothing"
        return "success"

    def drop(self) -> None:
        """Do nothing: the library has its own connections."""

    async def leave(self) -> None:
        """Close the client. The environment ends its session."""
        await self.close()

    async def close(self) -> None:
        """Close the client."""
        await self._stack.aclose()

    async def _connect(self) -> genie.Client:
        if self._client is None:
            client = genie.connect(self._addresses, session=self.secret, session_timeout=600)
            self._client = await self._stack.enter_async_context(client)
        return self._client

    def _record_error(self, error: Exception) -> None:
        self._checker.note(self.name, f"{type(error).__name__}: {error}")
        self._checker.counts[type(error).__name__] += 1
