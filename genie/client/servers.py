"""The servers of one client: which to try next, when, and what went wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from genie.client.reach import Address, delays, spell
from genie.errors import Unavailable


class Servers:
    """Addresses in the order in which they are tried.

    `connect_timeout` (seconds) is for a round over all of them. `delay` is what to wait before the next round: nothing
    after a connection that worked, then longer and longer.
    """

    def __init__(self, addresses: Sequence[Address], connect_timeout: float) -> None:
        if not 0 < connect_timeout < math.inf:
            raise ValueError(f"connect_timeout must be a number of seconds above 0, not {connect_timeout!r}")
        self.order = list(addresses)
        self.attempt_timeout = connect_timeout / len(self.order)
        self.delay = 0.0
        self._delays = delays()
        self._why = "no answer"

    def trying(self) -> list[Address]:
        """A round begins, and the next will have to wait."""
        self.delay = next(self._delays)
        return list(self.order)

    def failed(self, why: str | BaseException) -> None:
        """An attempt failed, or a connection ended."""
        if isinstance(why, BaseException):
            why = "no answer" if isinstance(why, TimeoutError) else str(why) or type(why).__name__
        self._why = why

    def worked(self) -> None:
        """A server has answered."""
        if self.delay:
            self.delay, self._delays = 0.0, delays()

    def lost(self, address: Address, why: str) -> str:
        """The connection to this one ended: the others are tried first. Returns what to tell those who waited."""
        self.failed(why)
        if address in self.order:
            place = self.order.index(address) + 1
            self.order = self.order[place:] + self.order[:place]
        return f"the connection to {spell(address)} was lost: {why}"

    def unavailable(self) -> Unavailable:
        """None of them can be reached."""
        return Unavailable(f"no server at {', '.join(map(spell, self.order))}: {self._why}")
