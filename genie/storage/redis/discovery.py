"""Discovery of the primary: a configured address, or the one that sentinels or the nodes of a cluster name."""

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
"""How long all nodes together have to say which Redis is the primary."""
FIRST_ANSWER_GRACE_S = 0.5
"""How long the other nodes have after the first answer."""
MAJORITY_GRACE_S = 0.05
"""How long the remaining nodes have once more than half have answered."""
MAX_QUERIED_NODES = 16
"""Cluster nodes queried at a time: this many of the URL, and as many of those that they have named."""
UNKNOWN_HOST = "?"
"""How a cluster node reports a host that it does not know."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrimaryLocation:
    """Where the primary is. `asking`: the node is importing the slot, and serves it only after ASKING."""

    address: Address
    asking: bool = False


class Discovery(Protocol):
    """Finds the current primary, each time it is asked."""

    primary_may_change: bool
    """Whether another Redis may become the primary. Then each connection must check that its Redis is one."""

    async def find(self) -> PrimaryLocation:
        """Return the current primary. RedisFailure where no node knows it."""

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Take note of an error with which the Redis at `address` has answered: it may name another primary."""


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
    """Asks all sentinels, and follows the one that knows the latest election."""

    primary_may_change = True

    def __init__(self, url: RedisUrl) -> None:
        self._url = url

    async def find(self) -> PrimaryLocation:
        """Return the primary with the highest configuration epoch: an isolated sentinel would name an older one.

        The epoch is asked for before the address: a sentinel that is just replacing the primary reports the new epoch
        with the old address in SENTINEL MASTER, but the new address in GET-MASTER-ADDR-BY-NAME.
        """
        url = self._url
        commands = ("SENTINEL", "MASTER", url.master), ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.master)
        answers, errors = await _query_all(url.nodes, url.sentinel_login, _parse_master, *commands)
        if answers:
            votes = Counter(answers)
            _, address = max(votes, key=lambda answer: (answer[0], votes[answer]))
            return PrimaryLocation(address)
        raise RedisFailure(f"no sentinel names a master {url.master!r} ({errors})")

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Ignore the error: the sentinels are asked each time."""


class ClusterDiscovery:
    """Asks the cluster nodes which of them serves the slot, and follows the majority, or a redirection just received."""

    primary_may_change = True

    def __init__(self, url: RedisUrl, key: str) -> None:
        self._url = url
        self._slot = key_slot(key.encode())
        self._named: tuple[Address, ...] = ()
        """All nodes of the last answers. Those of the URL are asked as well: their host names may still resolve when all
        others have moved."""
        self._redirect: PrimaryLocation | None = None

    async def find(self) -> PrimaryLocation:
        """Return the node that most nodes name as the primary of the slot."""
        redirect, self._redirect = self._redirect, None
        if redirect is not None:
            return redirect
        nodes = dict.fromkeys((*self._url.nodes[:MAX_QUERIED_NODES], *self._named[:MAX_QUERIED_NODES]))
        answers, errors = await _query_all(nodes, self._url.login, _parse_slots, ("CLUSTER", "SLOTS"))
        votes: Counter[Address] = Counter()
        named: dict[Address, None] = {}
        for ranges in answers:
            for first, last, servers in ranges:
                named |= dict.fromkeys(server for server in servers if server.host != UNKNOWN_HOST)
                if first <= self._slot <= last and servers and servers[0].host != UNKNOWN_HOST:
                    votes[servers[0]] += 1
        self._named = tuple(named) or self._named
        if votes:
            return PrimaryLocation(votes.most_common(1)[0][0])
        raise RedisFailure(f"no cluster node names a server for slot {self._slot} ({errors or 'no answer'})")

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Follow `MOVED slot host:port`, or `ASK`, by which the slot's keys are already on the node that imports it.

        Without a host, the redirection is to another port of the host that answered.
        """
        code, _, rest = str(error).partition(" ")
        if code not in ("MOVED", "ASK"):
            return
        host, _, port = rest.partition(" ")[2].rpartition(":")
        if port.isdecimal() and host != UNKNOWN_HOST:
            self._redirect = PrimaryLocation(Address(host.strip("[]") or address.host, int(port)), asking=code == "ASK")


def _parse_master(_: Address, master: list[bytes], address: list[bytes]) -> tuple[int, Address]:
    """Return the configuration epoch and the primary's address, as a sentinel reports them."""
    fields = dict(zip(master[::2], master[1::2], strict=True))
    return int(fields[b"config-epoch"]), Address(address[0].decode(), int(address[1]))


def _parse_slots(node: Address, ranges: list[Any]) -> list[tuple[int, int, list[Address]]]:
    """Return slot ranges, each with its first and last slot and the nodes that have it, the primary first."""
    return [
        (int(first), int(last), [Address((host or b"").decode() or node.host, int(port)) for host, port, *_ in servers])
        for first, last, *servers in ranges
    ]


async def _query_all(
    nodes: Iterable[Address], login: Login, parse: Callable[..., T], *commands: tuple[object, ...]
) -> tuple[list[T], str]:
    """Query all nodes at once, and stop waiting soon after the majority has answered: a node that hangs delays nothing.

    Returns the answers, and the errors of the other nodes as text.
    """
    loop = asyncio.get_running_loop()
    waiting = queries = [asyncio.ensure_future(_query(node, login, parse, *commands)) for node in nodes]
    answers: list[T] = []
    errors: dict[str, None] = {}
    until = loop.time() + QUERY_TIMEOUT_S
    try:
        while waiting and until > loop.time():
            done, _ = await asyncio.wait(waiting, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task in done]:  # in the order of the nodes, which a set has not
                error = task.exception()
                if error is None:
                    answers.append(task.result())
                else:
                    errors["no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__] = (
                        None
                    )
            waiting = [task for task in waiting if task not in done]
            if answers:
                grace_s = MAJORITY_GRACE_S if 2 * len(answers) > len(queries) else FIRST_ANSWER_GRACE_S
                until = min(until, loop.time() + grace_s)
        if waiting and not answers:
            errors["no answer"] = None
    finally:
        for task in queries:
            task.cancel()
        await asyncio.gather(*queries, return_exceptions=True)
    return answers, "; ".join(errors)


async def _query(node: Address, login: Login, parse: Callable[..., T], *commands: tuple[object, ...]) -> T:
    async with asyncio.timeout(QUERY_TIMEOUT_S):
        connection = await RedisConnection.open(node, login)
        try:
            replies = [await connection.call(*command) for command in commands]
        finally:
            connection.close()
    try:
        return parse(node, *replies)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise RedisFailure(f"{node} does not say what a sentinel or a node of a cluster would") from None
