"""Which replica has seen a wallet last: a hint, that asks may be routed by. Nothing depends on it.

It is told by shared locks `wallet-seen/<digest of the wallet>/<replica>`, which nobody releases: they end by their time.
"""

from __future__ import annotations

import asyncio
import hashlib
from math import inf

from genie.errors import GenieError
from genie.tasks import closing, end
from genie.tokens.sherdlock.background import Attempts, again_and_again
from genie.tokens.sherdlock.locks import Client, LockChange
from genie.tokens.token import Wallet

SEEN = "wallet-seen/"
EVERY_S = 5.0
"""A wallet that is used all the time is told so often."""
LASTS_S = 15.0
"""A hint that nobody repeats is forgotten after this."""
MOST = 100_000
"""Wallets whose last hint is remembered, so as not to repeat it too soon."""
MAX_REPLICA = 128


class Hints:
    """Tells which wallets this replica sees, and listens to what others tell."""

    def __init__(self, client: Client, replica: str) -> None:
        if not 0 < len(replica) <= MAX_REPLICA or not replica.isprintable():
            raise ValueError(f"replica must be 1 to {MAX_REPLICA} printable characters, not {replica!r}")
        self._client = client
        self._replica = replica
        self._told_at: dict[Wallet, float] = {}
        self._due: dict[Wallet, None] = {}
        self._some = asyncio.Event()
        self._seen: dict[str, dict[str, int]] = {}
        """By digest and replica: the last lock, whose number grows with time."""
        self._tasks: list[asyncio.Task[object]] = []

    def start(self) -> None:
        """Begin to tell and to listen."""
        loop = asyncio.get_running_loop()
        for what, once in (("telling who sees a wallet", self._tell), ("hearing who sees a wallet", self._listen)):
            self._tasks.append(loop.create_task(again_and_again(what, once)))

    async def close(self) -> None:
        """End it."""
        for task in self._tasks:
            await end(task)

    def saw(self, of: Wallet, now: float) -> None:
        """A wallet was selected from here."""
        if now - self._told_at.get(of, -inf) < EVERY_S:
            return
        if len(self._told_at) >= MOST:
            self._told_at.clear()
        self._told_at[of] = now
        self._due[of] = None
        self._some.set()

    def last_seen(self, of: Wallet) -> str | None:
        """Which replica was the last."""
        seen = self._seen.get(digest(of))
        return None if seen is None else max(seen, key=seen.__getitem__)

    async def _tell(self, attempts: Attempts) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            due, self._due = self._due, {}
            for of in due:
                try:
                    await self._client.acquire(
                        f"shared:{SEEN}{digest(of)}/{self._replica}", transaction_timeout=LASTS_S
                    )
                except GenieError:  # a hint less
                    await asyncio.sleep(attempts.delay_s())
                else:
                    attempts.worked()

    async def _listen(self, attempts: Attempts) -> None:
        self._seen.clear()
        async with closing(self._client.watch(SEEN)) as changes:
            async for change in changes:
                attempts.worked()
                self._heard(change)

    def _heard(self, change: LockChange) -> None:
        of, _, replica = change.resource[len(SEEN) :].partition("/")
        seen = self._seen.setdefault(of, {})
        if change.state == "locked":
            seen[replica] = max(change.id, seen.get(replica, 0))
        elif seen.get(replica) == change.id:
            del seen[replica]
        if not seen:
            del self._seen[of]


def digest(of: Wallet) -> str:
    """A wallet's name in hints: which it is can't be told from it, and it is short whatever the wallet is called."""
    return hashlib.sha256(repr(tuple(of)).encode(errors="backslashreplace")).hexdigest()[:32]
