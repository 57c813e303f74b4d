"""Discovery of the primary: a configured address, or the one that sentinels or the nodes of a cluster report."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from redis.crc import key_slot

from genie.storage.redis.connection import ErrorReply, RedisConnection, RedisFailure
from genie.storage.redis.url import Address, Login, RedisUrl

QUERY_TIMEOUT_S = 1.5
"""Time limit of a query, which is sent to all nodes in parallel."""
FIRST_REPLY_GRACE_S = 0.5
"""How long to wait for the other nodes after the first reply."""
MAJORITY_GRACE_S = 0.05
"""How long to wait for the remaining nodes once more than half have replied."""
MAX_QUERIED_NODES = 16
"""Cluster nodes queried at a time: this many of the URL, and as many of those that they have reported."""
UNKNOWN_HOST = "?"
"""How a cluster node reports a host that it does not know."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrimaryLocation:
    """Where the primary is. `asking`: the node is importing the slot, and serves it only after ASKING."""

    address: Address
    asking: bool = False


class Discovery(Protocol):
    """Finds the current primary: each call of `find` looks again."""

    primary_may_change: bool
    """Whether another Redis may become the primary. Then each new connection must verify that its Redis is the primary."""

    async def find(self) -> PrimaryLocation:
        """Return the current primary. RedisFailure if no node reports one."""

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Process an error reply of the Redis at `address`: a redirection names another primary."""


def discovery_for(url: RedisUrl, key: str) -> Discovery:
    """Return the discovery for a URL; in a cluster, for the slot of `key`."""
    if url.kind == "sentinel":
        return SentinelDiscovery(url)
    return ClusterDiscovery(url, key) if url.kind == "cluster" else Standalone(url.nodes[0])


class Standalone:
    """A single Redis: it is always the primary."""

    primary_may_change = False

    def __init__(self, address: Address) -> None:
        self._location = PrimaryLocation(address)

    async def find(self) -> PrimaryLocation:
        """Return its location."""
        return self._location

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Ignore the error: there is no other Redis."""


class SentinelDiscovery:
    """Queries all sentinels, and uses the reply with the latest election."""

    primary_may_change = True

    def __init__(self, url: RedisUrl) -> None:
        self._url = url

    async def find(self) -> PrimaryLocation:
        """Return the primary with the highest configuration epoch: an isolated sentinel would report an older one.

        The epoch is queried before the address: during a failover a sentinel reports the new epoch with the old address in
        SENTINEL MASTER, but the new address in GET-MASTER-ADDR-BY-NAME.
        """
        url = self._url
        commands = ("SENTINEL", "MASTER", url.master), ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.master)
        replies, errors = await _query_all(url.nodes, url.sentinel_login, _parse_master, *commands)
        if replies:
            votes = Counter(replies)
            _, address = max(votes, key=lambda epoch_and_address: (epoch_and_address[0], votes[epoch_and_address]))
            return PrimaryLocation(address)
        raise RedisFailure(f"no sentinel reports a master named {url.master!r} ({errors})")

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Ignore the error: the sentinels are queried each time."""


class ClusterDiscovery:
    """Queries the cluster nodes for the server of the slot, and uses the majority's, or a redirection just received."""

    primary_may_change = True

    def __init__(self, url: RedisUrl, key: str) -> None:
        self._url = url
        self._slot = key_slot(key.encode())
        self._reported_nodes: tuple[Address, ...] = ()
        """All nodes in the last replies. Those of the URL are queried as well: their host names may still resolve when all
        others have moved."""
        self._redirect: PrimaryLocation | None = None

    async def find(self) -> PrimaryLocation:
        """Return the node that most nodes report as the primary of the slot."""
        redirect, self._redirect = self._redirect, None
        if redirect is not None:
            return redirect
        nodes = dict.fromkeys((*self._url.nodes[:MAX_QUERIED_NODES], *self._reported_nodes[:MAX_QUERIED_NODES]))
        replies, errors = await _query_all(nodes, self._url.login, _parse_slots, ("CLUSTER", "SLOTS"))
        votes: Counter[Address] = Counter()
        reported_nodes: dict[Address, None] = {}
        for slot_ranges in replies:
            for first, last, servers in slot_ranges:
                reported_nodes |= dict.fromkeys(server for server in servers if server.host != UNKNOWN_HOST)
                if first <= self._slot <= last and servers and servers[0].host != UNKNOWN_HOST:
                    votes[servers[0]] += 1
        self._reported_nodes = tuple(reported_nodes) or self._reported_nodes
        if votes:
            return PrimaryLocation(votes.most_common(1)[0][0])
        raise RedisFailure(f"no cluster node reports a server for slot {self._slot} ({errors or 'no answer'})")

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Use the node that a redirection names: `MOVED slot host:port`, or `ASK slot host:port` while a slot is moved.

        Without a host, the redirection is to another port of the host that replied.
        """
        code, _, rest = str(error).partition(" ")
        if code not in ("MOVED", "ASK"):
            return
        host, _, port = rest.partition(" ")[2].rpartition(":")
        if port.isdecimal() and host != UNKNOWN_HOST:
            self._redirect = PrimaryLocation(Address(host.strip("[]") or address.host, int(port)), asking=code == "ASK")


def _parse_master(_: Address, master: list[bytes], address: list[bytes]) -> tuple[int, Address]:
    """Return the configuration epoch and the primary's address, from the replies of a sentinel to two commands.

    `master` is the reply to SENTINEL MASTER, `address` that to SENTINEL GET-MASTER-ADDR-BY-NAME.
    """
    fields = dict(zip(master[::2], master[1::2], strict=True))
    return int(fields[b"config-epoch"]), Address(address[0].decode(), int(address[1]))


def _parse_slots(node: Address, ranges: list[Any]) -> list[tuple[int, int, list[Address]]]:
    """Return the slot ranges in a reply to CLUSTER SLOTS: first slot, last slot, and the nodes, the primary first.

    A node without a host is the one that replied.
    """
    return [
        (int(first), int(last), [Address((host or b"").decode() or node.host, int(port)) for host, port, *_ in servers])
        for first, last, *servers in ranges
    ]


async def _query_all(
    nodes: Iterable[Address], login: Login, parse: Callable[..., T], *commands: tuple[object, ...]
) -> tuple[list[T], str]:
    """Query all nodes in parallel, and stop waiting soon after a majority has replied: a node that hangs delays nothing.

    Returns the parsed replies, and the errors of the other nodes as text.
    """
    loop = asyncio.get_running_loop()
    pending = queries = [asyncio.ensure_future(_query(node, login, parse, *commands)) for node in nodes]
    replies: list[T] = []
    errors: list[str] = []
    until = loop.time() + QUERY_TIMEOUT_S
    try:
        while pending and until > loop.time():
            done, _ = await asyncio.wait(pending, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in pending if task in done]:  # in the order of the nodes: a set has none
                error = task.exception()
                if error is None:
                    replies.append(task.result())
                else:
                    errors.append(
                        "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
                    )
            pending = [task for task in pending if task not in done]
            if replies:
                grace_s = MAJORITY_GRACE_S if 2 * len(replies) > len(queries) else FIRST_REPLY_GRACE_S
                until = min(until, loop.time() + grace_s)
        if pending and not replies:
            errors.append("no answer")
    finally:
        for task in queries:
            task.cancel()
        await asyncio.gather(*queries, return_exceptions=True)
    return replies, "; ".join(dict.fromkeys(errors))


async def _query(node: Address, login: Login, parse: Callable[..., T], *commands: tuple[object, ...]) -> T:
    """Run commands on a node, on a connection of its own, and return `parse(node, *replies)`."""
    async with asyncio.timeout(QUERY_TIMEOUT_S):
        connection = await RedisConnection.open(node, login)
        try:
            replies = [await connection.call(*command) for command in commands]
        finally:
            connection.close()
    try:
        return parse(node, *replies)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise RedisFailure(f"{node} is no sentinel or cluster node: unexpected reply to {commands[0][0]}") from None
