"""The servers of one client: which to try next, when, and what went wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from genie.backoff import Backoff
from genie.client.config import Address, format_address, parse_address
from genie.errors import RequestRejected, Unavailable
from genie.tls import reason

STABLE_CONNECTION_S = 2.0
"""A connection that stood for so long worked, even if nothing was asked on it."""

MAX_REDIRECTS = 3
"""To how many leaders a round follows the nodes that name one, before it pauses."""


class ServerList:
    """Addresses in the order in which they are tried.

    `connect_timeout` (seconds) is for a round over all of them. `delay` is what to wait before the next round: nothing
    after a connection that worked, then longer and longer. `answered` says whether a node has answered, be it only
    that it doesn't lead.
    """

    def __init__(self, addresses: Sequence[Address], connect_timeout: float) -> None:
        if not 0 < connect_timeout < math.inf:
            raise ValueError(f"connect_timeout must be a number of seconds above 0, not {connect_timeout!r}")
        self.order = list(addresses)
        self.attempt_timeout = connect_timeout / len(self.order)
        self.delay = 0.0
        self.answered = False
        self._backoff = Backoff()
        self._leader: Address | None = None
        self._why = "no answer"
        self._rejection = ""

    def round(self) -> Iterator[Address]:
        """Each address once, and first of what is left whichever was named as the leader; the next round has to wait.

        A node is tried once in a round, so two that name each other are left alone until the next.
        """
        self.delay = self._backoff.next_delay()
        left = list(self.order)
        tried: set[Address] = set()
        redirections = 0
        while True:
            leader, self._leader = self._leader, None
            if leader is not None and leader not in tried and redirections < MAX_REDIRECTS:
                redirections += 1
                left = [address for address in left if address != leader]
                address = leader
            elif left:
                address = left.pop(0)
            else:
                return
            tried.add(address)
            yield address

    def on_failure(self, why: str | BaseException) -> None:
        """An attempt failed, or a connection ended. One that was broken off, and has no reason, leaves the last one."""
        if isinstance(why, BaseException):
            why = "no answer" if isinstance(why, TimeoutError) else reason(why)
        self._why = why or self._why

    def on_rejection(self, address: Address, error: RequestRejected) -> None:
        """Note that a server rejected this client for good, while another one may accept it."""
        self.answered = True
        self._rejection = f"{format_address(address)} answered {error}"

    def on_redirect(self, node: Address, leader: str) -> None:
        """A node has answered that it doesn't lead, and who does where it knows that. That is reached as the node was."""
        self.answered = True
        try:
            self._leader = parse_address(leader, tls=node.tls) if leader else None
        except ValueError:
            self._leader = None

    def on_success(self) -> None:
        """A server has answered a call."""
        if self.delay:
            self.delay = 0.0
            self._backoff.reset()
            self._rejection = ""

    def on_disconnect(self, address: Address, why: str, stood: float) -> str:
        """The connection to this one ended, which `stood` for so many seconds: the others are tried first.

        Returns what to tell those who waited.
        """
        self.on_failure(why)
        if stood >= STABLE_CONNECTION_S:
            self.on_success()
        if address in self.order:
            place = self.order.index(address) + 1
            self.order = self.order[place:] + self.order[:place]
        return f"the connection to {format_address(address)} was lost: {why}"

    def unavailable_error(self) -> Unavailable:
        """None of them can be reached."""
        rejection = f" ({self._rejection})" if self._rejection else ""
        return Unavailable(f"no server at {', '.join(map(format_address, self.order))}: {self._why}{rejection}")
