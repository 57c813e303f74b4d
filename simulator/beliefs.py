"""Records which locks the library clients of a simulation consider held, so that a checker can compare them with the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from genie.client.aio import Lock
from genie.testing.simulation.loop import NODE, Node, SimLoop
from simulator.history import BELIEF, ClusterHistory

RESUMPTION_S = 1e-4
"""After a stopped process continues, its timers need some iterations of the loop to cancel the blocks of expired locks."""


@dataclass(slots=True, frozen=True)
class Belief:
    """True if the application of a library client considers a lock held."""

    id: int
    held: bool
    """True if `lock.held` is true."""
    in_block: bool
    """True if the block of the lock's `async with` statement is running, and was not cancelled."""


class _Observed:
    """A lock that an application uses, and what was recorded about it last."""

    def __init__(self, lock: Lock, node: Node) -> None:
        self.lock = lock
        self.node = node
        self.block: asyncio.Task[Any] | None = None
        """The task in the block of the lock's `async with` statement; None: there is no block, or it has ended."""
        self.recorded = Belief(lock.id, held=False, in_block=False)

    def current(self, now: float) -> Belief:
        """Return whether the application considers the lock held now.

        The attribute `held` is also right in a stopped process, because it is computed when it is read. A block can't be
        cancelled while its process is stopped.
        """
        node, block = self.node, self.block
        is_suspended = node.stopped or now < node.continued_at + RESUMPTION_S
        return Belief(
            self.lock.id,
            held=not node.dead and self.lock.held,
            in_block=not node.dead and not is_suspended and block is not None and not block.cancelling(),
        )


class Beliefs:
    """Records in the history when a library client begins or ceases to consider a lock held.

    The locks are compared with their last entries before each change of the store, because a client must have ceased before
    another client can be granted the lock, and after each input of a client, because only an answer can prolong a lock.
    """

    def __init__(self, loop: SimLoop, history: ClusterHistory) -> None:
        self._loop = loop
        self._history = history
        self._observed: dict[int, _Observed] = {}
        """The locks by request id."""
        history.before_change = self.record
        history.after_input = self._record_soon

    def observe(self, lock: Lock) -> None:
        """Record from now on whether the lock is held, until it no longer is."""
        node = NODE.get()
        assert node is not None
        self._observed[lock.id] = _Observed(lock, node)
        self.record()

    @contextmanager
    def in_block(self, lock: Lock) -> Iterator[None]:
        """Record also whether the block of the lock's `async with` statement is running; used within that block."""
        self.observe(lock)
        observed = self._observed[lock.id]
        observed.block = asyncio.current_task()
        try:
            yield
        finally:
            observed.block = None

    def forget(self, lock: Lock) -> None:
        """End the recording, because the application no longer relies on the lock: it releases the lock by its id."""
        observed = self._observed.pop(lock.id, None)
        if observed is not None:
            self._append(observed, Belief(lock.id, held=False, in_block=False))

    def record(self) -> None:
        """Append an entry to the history for each lock whose state has changed for its application."""
        now = self._loop.time()
        for id_, observed in list(self._observed.items()):
            belief = observed.current(now)
            self._append(observed, belief)
            if not belief.held and observed.block is None:
                del self._observed[id_]

    def _append(self, observed: _Observed, belief: Belief) -> None:
        if belief != observed.recorded:
            observed.recorded = belief
            self._history.append(BELIEF, observed.node.name, belief)

    def _record_soon(self) -> None:
        """Record in the next iteration of the loop, when the client has processed its input."""
        self._loop.call_soon(self.record, context=Context())
