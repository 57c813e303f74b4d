"""Failover: in which order and after which delay a client tries its servers, and why the last attempt failed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from genie.backoff import Backoff
from genie.client.config import Address, format_address, parse_address
from genie.errors import RequestRejected, Unavailable
from genie.tls import describe_error

STABLE_CONNECTION_S = 2.0
"""A connection that lasted this long counts as successful, even without a reply: the backoff is reset."""

MAX_REDIRECTS = 3
"""Redirects to a leader that are followed in one round over the servers."""


class ServerList:
    """The server addresses of one client, in the order in which it tries them.

    `connect_timeout` (seconds) is divided among the attempts of one round over all addresses. `delay` is the backoff
    before the next round; 0 after a successful connection. `answered`: whether any server has replied, even if only
    that it is not the leader.
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
        self._last_failure = "no answer"
        self._rejection = ""

    def next_round(self) -> Iterator[Address]:
        """Yield the addresses of one round of connection attempts, each at most once, and increase the backoff.

        If the last server tried has named a leader, the leader comes next. Since it is not tried twice in a round,
        two servers that redirect to each other do not cause a loop.
        """
        self.delay = self._backoff.next_delay()
        remaining = list(self.order)
        tried: set[Address] = set()
        redirects = 0
        while True:
            leader, self._leader = self._leader, None
            if leader is not None and leader not in tried and redirects < MAX_REDIRECTS:
                redirects += 1
                remaining = [address for address in remaining if address != leader]
                address = leader
            elif remaining:
                address = remaining.pop(0)
            else:
                return
            tried.add(address)
            yield address

    def on_failure(self, failure: str | BaseException) -> None:
        """Record why a connection attempt failed or a connection ended; an empty reason keeps the previous one."""
        if isinstance(failure, BaseException):
            failure = "no answer" if isinstance(failure, TimeoutError) else describe_error(failure)
        self._last_failure = failure or self._last_failure

    def on_rejection(self, address: Address, error: RequestRejected) -> None:
        """Record that a server rejected the handshake for good, while another one may accept it."""
        self.answered = True
        self._rejection = f"{format_address(address)} answered {error}"

    def on_redirect(self, server: Address, leader: str) -> None:
        """Record the leader that a follower named; empty if it knows none. Use TLS for it as for the follower."""
        self.answered = True
        try:
            self._leader = parse_address(leader, tls=server.tls) if leader else None
        except ValueError:
            self._leader = None

    def on_success(self) -> None:
        """Reset the backoff after a server has replied to a call."""
        if self.delay:
            self.delay = 0.0
            self._backoff.reset()
            self._rejection = ""

    def on_disconnect(self, address: Address, reason: str, connected_s: float) -> str:
        """Move a server whose connection ended after `connected_s` seconds to the end of the order.

        Returns:
            The error message for the calls that fail with the connection.

        """
        self.on_failure(reason)
        if connected_s >= STABLE_CONNECTION_S:
            self.on_success()
        if address in self.order:
            next_index = self.order.index(address) + 1
            self.order = self.order[next_index:] + self.order[:next_index]
        return f"the connection to {format_address(address)} was lost: {reason}"

    def unavailable_error(self) -> Unavailable:
        """Return the error for callers when no server can be reached, with the last failure."""
        rejection = f" ({self._rejection})" if self._rejection else ""
        addresses = ", ".join(map(format_address, self.order))
        return Unavailable(f"no server at {addresses}: {self._last_failure}{rejection}")
