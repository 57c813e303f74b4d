"""Failover: the order in which a client tries its servers, the delays between the rounds, and the reason of the last
failure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from genie.backoff import Backoff
from genie.client.config import Address, format_address, parse_address
from genie.errors import RequestRejected
from genie.tls import describe_error

STABLE_CONNECTION_S = 2.0
"""A connection that lasted this long counts as successful, even without a reply: the backoff is reset."""

ATTEMPT_TIMEOUT_S = 5.0
"""Limit of one attempt: the TCP connection, TLS and the handshake."""

FIRST_HELLO_TIMEOUT_S = 1.0
"""Time limit for the answer of a server to `hello`, in the first round and if other servers remain: the server may hang. The
limit is shorter if `connect_timeout` is too short for two such waits at each server."""

MAX_REDIRECTS = 3
"""How many redirects to a leader the client follows in one round over the servers."""


class AddressRound:
    """The addresses of one round of connection attempts, each at most once.

    If a server has named a leader (a redirect), that leader is tried next. No server is tried twice in a round, so two
    servers that redirect to each other do not cause a loop.
    """

    def __init__(self, servers: ServerList) -> None:
        self._servers = servers
        self.remaining = list(servers.addresses)
        """The addresses that were not taken yet."""
        self._tried: set[Address] = set()
        self._redirects = 0

    def __iter__(self) -> Iterator[Address]:
        while (address := self.take()) is not None:
            yield address

    def take(self) -> Address | None:
        """Remove and return the next address, or None if there is none. A later redirect may add another address."""
        leader = self._servers.take_leader()
        if leader is not None and leader not in self._tried and self._redirects < MAX_REDIRECTS:
            self._redirects += 1
            self.remaining = [address for address in self.remaining if address != leader]
            self._tried.add(leader)
            return leader
        if not self.remaining:
            return None
        address = self.remaining.pop(0)
        self._tried.add(address)
        return address


class ServerList:
    """The server addresses of one client, in the order in which it tries them, and the reasons of its last failures.

    `connect_timeout` is in seconds. A single attempt does not last longer.
    """

    def __init__(self, addresses: Sequence[Address], connect_timeout: float) -> None:
        if not 0 < connect_timeout < math.inf:
            raise ValueError(f"connect_timeout must be a number of seconds above 0, not {connect_timeout!r}")
        self.addresses = list(addresses)
        """The addresses in the order of the next round."""
        self.attempt_timeout_s = min(ATTEMPT_TIMEOUT_S, connect_timeout)
        """Seconds for one connection attempt."""
        self._first_hello_timeout_s = min(FIRST_HELLO_TIMEOUT_S, connect_timeout / (2 * len(self.addresses)))
        self.hello_timeout_s = self._next_hello_timeout_s = self._first_hello_timeout_s
        """Seconds for the answer to `hello`, if there are other servers to try. Doubled in each round."""
        self.any_server_answered = False
        """True if any server has replied, even with an error, such as a follower's `unavailable`."""
        self.next_round_delay_s = 0.0
        """Seconds to wait before the next round. 0 after a successful connection."""
        self._backoff = Backoff()
        """Computes `next_round_delay_s`."""
        self._leader: Address | None = None
        """The leader that the last server named, until it is tried. None if no leader was named."""
        self._last_failure = "no answer"
        """Why the last attempt or connection failed, for error messages."""
        self._missing = "server"
        """What is missing at the addresses, for error messages: "serving leader" if the last server answered `unavailable`,
        else "server"."""
        self._rejection = ""
        """The last server that rejected the client for good, and its error, for error messages. Empty if none did."""

    def next_round(self) -> AddressRound:
        """Begin a round of connection attempts, and increase the backoff."""
        self.next_round_delay_s = self._backoff.next_delay()
        self.hello_timeout_s = min(self._next_hello_timeout_s, self.attempt_timeout_s)
        self._next_hello_timeout_s *= 2
        return AddressRound(self)

    @property
    def is_redirected(self) -> bool:
        """True if a follower has named a leader, and the client has not tried that leader yet."""
        return self._leader is not None

    def take_leader(self) -> Address | None:
        """Return the leader that a follower has named since the last call of this method, or None."""
        leader, self._leader = self._leader, None
        return leader

    def on_failure(self, failure: str | BaseException) -> None:
        """Record, for error messages, why a connection or an attempt to connect failed.

        An empty text keeps the reason of the previous failure. If the server was no leader, call `on_redirect` afterwards.
        """
        if isinstance(failure, TimeoutError):
            failure = "no answer"
        elif isinstance(failure, BaseException):
            failure = describe_error(failure)
        if failure:
            self._last_failure, self._missing = failure, "server"

    def on_silence(self, address: Address) -> None:
        """Move a server to the end of the order, because it did not answer `hello`."""
        if address in self.addresses:
            self.addresses.remove(address)
            self.addresses.append(address)

    def on_rejection(self, address: Address, error: RequestRejected) -> None:
        """Record, for error messages, that a server rejected this client for good. The other servers are still tried."""
        self.any_server_answered = True
        self._rejection = f"{format_address(address)} answered {error}"

    def on_redirect(self, server: Address, leader: str) -> None:
        """Record that the follower `server` named the leader: its address as text, or empty if the follower knows none.

        The leader will be tried next, with the TLS context of the follower. An invalid address is ignored.
        """
        self.any_server_answered = True
        self._missing = "serving leader"
        self._leader = None
        if leader:
            with contextlib.suppress(ValueError):
                self._leader = parse_address(leader, tls=server.tls)

    def on_success(self) -> None:
        """Reset the backoff and the last rejection, because a server has replied to a call."""
        if self.next_round_delay_s:  # else nothing has changed since the last reset
            self.next_round_delay_s = 0.0
            self._next_hello_timeout_s = self._first_hello_timeout_s
            self._backoff.reset()
            self._rejection = ""

    def on_disconnect(self, address: Address, reason: str, connected_s: float) -> str:
        """Record the end of a connection, and make the next round begin with the server after this one.

        If the connection lasted for at least `STABLE_CONNECTION_S`, the backoff is reset. `connected_s` is its duration in
        seconds.

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

    def explain_unavailable(self) -> str:
        """Return why no server can be reached, with the reason of the last failure, for error messages."""
        rejection = f" ({self._rejection})" if self._rejection else ""
        addresses = ", ".join(map(format_address, self.addresses))
        return f"no {self._missing} at {addresses}: {self._last_failure}{rejection}"
