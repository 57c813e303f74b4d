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

    `connect_timeout` (seconds) is divided among the connection attempts of one round over all addresses.
    """

    def __init__(self, addresses: Sequence[Address], connect_timeout: float) -> None:
        if not 0 < connect_timeout < math.inf:
            raise ValueError(f"connect_timeout must be a number of seconds above 0, not {connect_timeout!r}")
        self.addresses = list(addresses)
        """The addresses in the order of the next round."""
        self.attempt_timeout_s = connect_timeout / len(self.addresses)
        """Seconds for one connection attempt."""
        self.next_round_delay_s = 0.0
        """Seconds to wait before the next round; 0 after a successful connection."""
        self.any_server_answered = False
        """Whether any server has replied, even if only that it is not the leader."""
        self._backoff = Backoff()
        """Computes `next_round_delay_s`."""
        self._leader: Address | None = None
        """The leader that the last server named; None: none was named, or the leader was tried since."""
        self._last_failure = "no answer"
        """Why the last attempt or connection failed, for error messages."""
        self._rejection = ""
        """The last server that rejected the client for good, with its error, for error messages; empty: none did."""

    def next_round(self) -> Iterator[Address]:
        """Yield the addresses of one round of connection attempts, each at most once, and increase the backoff.

        If the server that was tried last has named a leader (a redirect), that leader is tried next. No server is
        tried twice in a round, so two servers that redirect to each other do not cause a loop.
        """
        self.next_round_delay_s = self._backoff.next_delay()
        remaining = list(self.addresses)
        tried: set[Address] = set()
        redirect_count = 0
        while True:
            leader, self._leader = self._leader, None
            if leader is not None and leader not in tried and redirect_count < MAX_REDIRECTS:
                redirect_count += 1
                remaining = [address for address in remaining if address != leader]
                address = leader
            elif remaining:
                address = remaining.pop(0)
            else:
                return
            tried.add(address)
            yield address

    def on_failure(self, failure: str | BaseException) -> None:
        """Record, for error messages, why a connection or an attempt to connect failed.

        An empty text keeps the reason of the previous failure.
        """
        if isinstance(failure, BaseException):
            failure = "no answer" if isinstance(failure, TimeoutError) else describe_error(failure)
        self._last_failure = failure or self._last_failure

    def on_rejection(self, address: Address, error: RequestRejected) -> None:
        """Record, for error messages, that a server rejected this client for good. The other servers are still tried."""
        self.any_server_answered = True
        self._rejection = f"{format_address(address)} answered {error}"

    def on_redirect(self, server: Address, leader: str) -> None:
        """Record that the follower `server` named the address of the leader. Empty: the follower knows no leader.

        The leader will be tried next, with the TLS context of the follower. An invalid address is ignored.
        """
        self.any_server_answered = True
        try:
            self._leader = parse_address(leader, tls=server.tls) if leader else None
        except ValueError:
            self._leader = None

    def on_success(self) -> None:
        """Reset the backoff and the last rejection, because a server has replied to a call."""
        if self.next_round_delay_s:  # else nothing has changed since the last reset
            self.next_round_delay_s = 0.0
            self._backoff.reset()
            self._rejection = ""

    def on_disconnect(self, address: Address, reason: str, connected_s: float) -> str:
        """Handle the end of a connection that lasted `connected_s` seconds.

        The order is rotated, so that the next round begins with the server after this one. A connection that lasted at
        least `STABLE_CONNECTION_S` resets the backoff.

        Returns:
            The error message for the calls that fail with the connection.

        """
        self.on_failure(reason)
        if connected_s >= STABLE_CONNECTION_S:
            self.on_success()
        if address in self.addresses:  # a leader that a follower named may be missing from the list
            next_index = self.addresses.index(address) + 1
            self.addresses = self.addresses[next_index:] + self.addresses[:next_index]
        return f"the connection to {format_address(address)} was lost: {reason}"

    def unavailable_error(self) -> Unavailable:
        """Return the error for calls while no server can be reached, with the reason of the last failure."""
        rejection = f" ({self._rejection})" if self._rejection else ""
        addresses = ", ".join(map(format_address, self.addresses))
        return Unavailable(f"no server at {addresses}: {self._last_failure}{rejection}")
