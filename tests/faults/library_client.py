"""Our own client for asyncio, in the same place: one lock at a time, and what it raises is counted."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import genie
from faults.link import Address
from faults.watch import Grant, Watch

WAIT_S = 300.0


class LibraryClient:
    """`genie.connect` with all the addresses. It connects with its first lock."""

    def __init__(self, name: str, addresses: list[Address], watch: Watch, seed: str) -> None:
        self.name = name
        self.secret = f"the secret of {name} in {seed}"
        self._addresses = [f"{host}:{port}" for host, port in addresses]
        self._watch = watch
        self._doing = "nothing"
        self._client: genie.Client | None = None
        self._stack = AsyncExitStack()
        self._lock: genie.Lock | None = None
        self._grant: Grant | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self._doing}"

    async def lock(self, keys: tuple[str, ...], hold_ms: int) -> Grant | None:
        """Wait for a lock. None where it was lost before this client heard of it."""
        self._doing = f"waits for {keys}"
        while True:
            asked_at = time.monotonic()
            try:
                client = await self._connected()
                self._lock = lock = await client.acquire(
                    *keys, queue_timeout=WAIT_S, transaction_timeout=hold_ms / 1000
                )
            except genie.TransactionTimeout:
                return None
            except (genie.Unavailable, genie.ConnectionLost) as error:
                self._raised(error)
                continue
            except genie.GenieError as error:
                self._watch.violate(f"{self}: {type(error).__name__} {error}")
                return None
            self._doing = f"holds {lock.id}"
            self._grant = grant = Grant(self.name, lock.id, lock.fence, keys, asked_at + hold_ms / 1000)
            self._watch.known_as(self.name, str(lock.id), lock.id)
            self._watch.granted(grant, connected_at=None, again=False)
            return grant

    async def extend(self, hold_ms: int) -> None:
        """Let the hold begin anew, or not: what it raises then is the caller's to know."""
        assert self._lock is not None
        assert self._grant is not None
        begun = time.monotonic()
        try:
            await self._lock.extend(hold_ms / 1000)
        except (genie.Unavailable, genie.ConnectionLost) as error:
            self._raised(error)
        except genie.LockLost as error:
            if self._grant.sure:
                self._watch.violate(f"{self}: {error}")
        else:
            self._grant.sure_until = begun + hold_ms / 1000

    async def release(self) -> str:
        """Give it back."""
        assert self._lock is not None
        self._doing = f"releases {self._lock.id}"
        while True:
            try:
                await self._lock.release()
            except (genie.Unavailable, genie.ConnectionLost) as error:
                self._raised(error)
                break  # it goes on trying in the background
            except genie.GenieError as error:
                self._watch.violate(f"{self}: {type(error).__name__} {error}")
            break
        self._doing = "nothing"
        return "success"

    def drop(self) -> None:
        """Its connections are its own."""

    async def leave(self) -> None:
        """Close it. Its session is ended by the world."""
        await self.close()

    async def close(self) -> None:
        """Close it."""
        await self._stack.aclose()

    async def _connected(self) -> genie.Client:
        if self._client is None:
            client = genie.connect(self._addresses, session=self.secret, session_timeout=600)
            self._client = await self._stack.enter_async_context(client)
        return self._client

    def _raised(self, error: Exception) -> None:
        self._watch.note(self.name, f"{type(error).__name__}: {error}")
        self._watch.counts[type(error).__name__] += 1
