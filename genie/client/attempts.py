"""One round of staggered attempts to connect (RFC 8305), over all addresses of all servers.

An attempt begins 250 ms after the previous attempt, or as soon as an attempt has failed. So an address that does not answer
costs at most 250 ms. A host name is resolved when its turn comes, and each of its addresses is an attempt. The first attempt
that completes its handshake with a leader wins, and the others are closed.

Attempts connect at the same time, but only one of them sends `hello` at a time. Several addresses may belong to one server:
a second `hello` to that server, with the same session secret, would take over the session of the first.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from genie.client.config import Address
from genie.client.failover import ServerList
from genie.errors import RequestRejected

STAGGER_S = 0.25
"""Time after which the next attempt begins, even if the previous attempt has no result yet."""

LATE_LOOKUP_S = 5.0
"""How long the result of a lookup is kept that took longer than its caller waited. More than the pause between two rounds."""


class Endpoint(NamedTuple):
    """One IP address of a server. `address` is the server's address as configured."""

    address: Address
    ip: str


class Resolver:
    """Resolves the names of servers. At most one lookup of a name runs at a time, because each occupies a thread.

    A lookup may take longer than its caller waits: the system asks its second name server after 5 s. So the result is kept for
    the caller of the next round, whose own lookup would take as long.
    """

    def __init__(self) -> None:
        self._lookups: dict[Address, asyncio.Future[list[Any]]] = {}
        """The lookups that run, or whose result no caller has received yet."""

    async def resolve(self, address: Address) -> list[str]:
        """Return the IP addresses of a server. Raises OSError or UnicodeError if its name can't be resolved."""
        lookup = self._lookups.get(address)
        if lookup is None:
            loop = asyncio.get_running_loop()
            lookup = asyncio.ensure_future(loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
            self._lookups[address] = lookup
            lookup.add_done_callback(lambda done: self._on_lookup_done(address, done))
        try:
            # A cancelled caller must not cancel the lookup of other callers.
            address_infos = await asyncio.shield(lookup)
        finally:
            if lookup.done():
                self._forget(address, lookup)
        ips = [str(socket_address[0]) for *_, socket_address in address_infos]
        return list(dict.fromkeys(ips))  # without duplicates

    def close(self) -> None:
        """Cancel the running lookups, because the client is closed. Their threads end by themselves."""
        for lookup in self._lookups.values():
            lookup.cancel()
        self._lookups.clear()

    def _on_lookup_done(self, address: Address, lookup: asyncio.Future[list[Any]]) -> None:
        if not lookup.cancelled():
            lookup.exception()  # else asyncio would log the error of a lookup whose callers were cancelled
            lookup.get_loop().call_later(LATE_LOOKUP_S, self._forget, address, lookup)

    def _forget(self, address: Address, lookup: asyncio.Future[list[Any]]) -> None:
        if self._lookups.get(address) is lookup:
            del self._lookups[address]


class Round:
    """Tries each endpoint once, in the order of `ServerList.next_round`.

    `attempt` connects to an endpoint, and returns whether the server has accepted the client. A failed connection returns
    False, and raises no OSError.
    """

    def __init__(
        self,
        servers: ServerList,
        resolver: Resolver,
        attempt: Callable[[Round, Endpoint], Coroutine[object, object, bool]],
    ) -> None:
        self._servers = servers
        self._resolver = resolver
        self._attempt = attempt
        self._addresses = servers.next_round()
        self._first_endpoints: deque[Endpoint] = deque()
        """The untried endpoints that are the first of their resolved name."""
        self._further_endpoints: deque[Endpoint] = deque()
        """The other untried endpoints. They are tried after the first endpoint of each name."""
        self._tasks: list[asyncio.Task[bool]] = []
        """The running attempts and resolutions, in the order in which they began."""
        self.failures: list[RequestRejected | None] = []
        """For each endpoint that has failed, the error with which the server rejected the client for good, or None."""
        self.turn = asyncio.Lock()
        """Held by the attempt that sends `hello`."""

    @property
    def is_last(self) -> bool:
        """True if only one attempt runs, and all other endpoints were tried."""
        return len(self._tasks) <= 1 and not (
            self._addresses.remaining or self._first_endpoints or self._further_endpoints
        )

    async def run(self) -> bool:
        """Try all endpoints. Returns True as soon as a server has accepted the client, or False if none has."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                step = self._next_step()
                if step is not None:
                    self._tasks.append(loop.create_task(step))
                elif not self._tasks:
                    return False
                done, _ = await asyncio.wait(
                    self._tasks, timeout=None if step is None else STAGGER_S, return_when=asyncio.FIRST_COMPLETED
                )
                self._tasks = [task for task in self._tasks if task not in done]
                results = [task.result() for task in done]  # raises the error of a task
                if any(results):
                    return True
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _next_step(self) -> Coroutine[object, object, bool] | None:
        """Return the next attempt, or the resolution of the next name, or None if all have begun.

        The coroutine returns whether a server has accepted the client. A leader that a follower has named is tried first.
        """
        if self._first_endpoints and not self._servers.is_redirected:
            return self._attempt(self, self._first_endpoints.popleft())
        address = self._addresses.take()
        if address is not None and _is_ip(address.host):
            return self._attempt(self, Endpoint(address, address.host))
        if address is not None:
            return self._resolve(address)
        return self._attempt(self, self._further_endpoints.popleft()) if self._further_endpoints else None

    async def _resolve(self, address: Address) -> bool:
        """Resolve the name of a server, and add its endpoints to the round. Returns False, since no server was tried."""
        try:
            async with asyncio.timeout(self._servers.attempt_timeout_s):
                ips = await self._resolver.resolve(address)
        except (OSError, UnicodeError) as error:  # including TimeoutError
            self._servers.on_failure(error)
            self.failures.append(None)
            return False
        first, *further = [Endpoint(address, ip) for ip in ips]
        self._first_endpoints.append(first)
        self._further_endpoints.extend(further)
        return False


def _is_ip(host: str) -> bool:
    """Return whether a host is an IP address, which needs no resolution."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
