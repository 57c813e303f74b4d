"""Discovery of the primary: a configured address, or the address that sentinels or cluster nodes report."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from redis.crc import key_slot

from genie.storage.redis.connection import ErrorReply, RedisConnection, RedisFailure, describe_failure
from genie.storage.redis.url import Address, Login, RedisUrl

QUERY_TIMEOUT_S = 1.5
"""Time limit for querying all nodes, which happens in parallel."""
FIRST_REPLY_GRACE_S = 0.5
"""How long to wait for the other nodes after the first reply."""
MAJORITY_GRACE_S = 0.05
"""How long to wait for the remaining nodes once more than half have replied."""
MAX_QUERIED_NODES = 16
"""How many nodes of the URL are queried at most. The same limit applies to the nodes that the cluster has reported."""
UNKNOWN_HOST = "?"
"""A cluster node reports this instead of a host name that it does not know."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrimaryLocation:
    """Where the primary is, and how it accepts commands."""

    address: Address
    asking: bool = False
    """True if the node is importing the hash slot, so that it accepts a command only after ASKING."""


class Discovery(Protocol):
    """Finds the current primary. Each call of `find` queries again."""

    primary_may_change: bool
    """True if another Redis may become the primary. Then a connection to a primary must be verified."""

    async def find(self) -> PrimaryLocation:
        """Return the location of the current primary. Raises RedisFailure if no node reports a primary."""

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """If an error reply of the Redis at `address` is a redirection, the next `find` returns its target."""


def discovery_for(url: RedisUrl, key: str) -> Discovery:
    """Return the discovery that the URL requires. In a cluster it finds the primary of the hash slot of `key`."""
    if url.kind == "sentinel":
        return SentinelDiscovery(url)
    return ClusterDiscovery(url, key) if url.kind == "cluster" else Standalone(url.nodes[0])


class Standalone:
    """A single Redis, which is always the primary."""

    primary_may_change = False

    def __init__(self, address: Address) -> None:
        self._location = PrimaryLocation(address)

    async def find(self) -> PrimaryLocation:
        """Return the configured location, without a query."""
        return self._location

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Ignore the error: there is no other Redis."""


class SentinelDiscovery:
    """Queries all sentinels, and uses the reply with the highest configuration epoch (the latest failover)."""

    primary_may_change = True

    def __init__(self, url: RedisUrl) -> None:
        self._url = url

    async def find(self) -> PrimaryLocation:
        """Return the primary of the highest configuration epoch, because an isolated sentinel may report a former primary.

        Sentinels of the same epoch vote by majority. Each sentinel is queried twice, because during a failover SENTINEL
        MASTER returns the new epoch with the old address; only GET-MASTER-ADDR-BY-NAME returns the new address.
        """
        url = self._url
        commands = ("SENTINEL", "MASTER", url.master), ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.master)
        replies, errors = await _query_all(url.nodes, url.sentinel_login, _parse_master, *commands)
        if not replies:
            raise RedisFailure(f"no sentinel reports a master named {url.master!r} ({errors})")
        latest_epoch = max(epoch for epoch, _ in replies)
        votes = Counter(address for epoch, address in replies if epoch == latest_epoch)
        return PrimaryLocation(votes.most_common(1)[0][0])

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Ignore the error: `find` queries the sentinels each time."""


class ClusterDiscovery:
    """Queries the cluster nodes for the primary of the hash slot, or uses the target of the last redirection (MOVED or ASK)."""

    primary_may_change = True

    def __init__(self, url: RedisUrl, key: str) -> None:
        self._url = url
        self._slot = key_slot(key.encode())
        """The hash slot whose primary is searched."""
        self._reported_nodes: tuple[Address, ...] = ()
        """All nodes in the last replies. The nodes of the URL are queried as well: their host names may still resolve
        when the addresses of all nodes have changed."""
        self._redirect: PrimaryLocation | None = None
        """The target of the last redirection, until `find` returns it."""

    async def find(self) -> PrimaryLocation:
        """Return the target of the last redirection, unless it was returned before.

        Otherwise queries the cluster nodes, and returns the node that most of them report as the primary of the hash
        slot.
        """
        redirect, self._redirect = self._redirect, None
        if redirect is not None:
            return redirect
        # A dict in place of a set keeps the order of the nodes.
        nodes = dict.fromkeys((*self._url.nodes[:MAX_QUERIED_NODES], *self._reported_nodes[:MAX_QUERIED_NODES]))
        replies, errors = await _query_all(nodes, self._url.login, _parse_slots, ("CLUSTER", "SLOTS"))
        slot_ranges = [slot_range for reply in replies for slot_range in reply]
        reported = dict.fromkeys(
            node for slot_range in slot_ranges for node in slot_range.nodes if node.host != UNKNOWN_HOST
        )
        self._reported_nodes = tuple(reported) or self._reported_nodes
        primaries = (slot_range.nodes[0] for slot_range in slot_ranges if slot_range.has_primary_of(self._slot))
        votes = Counter(primaries)
        if not votes:
            raise RedisFailure(f"no cluster node reports a primary for slot {self._slot} ({errors or 'no answer'})")
        return PrimaryLocation(votes.most_common(1)[0][0])

    def on_error_reply(self, error: ErrorReply, address: Address) -> None:
        """Store the target of a redirection: `MOVED slot host:port`, or `ASK slot host:port` while a slot is migrated.

        In a redirection without a host, the target is another port of the host in `address`, which sent the
        redirection.
        """
        if error.code not in ("MOVED", "ASK"):
            return
        _slot, _, target = str(error).removeprefix(f"{error.code} ").partition(" ")
        host, _, port = target.rpartition(":")
        if port.isdecimal() and host != UNKNOWN_HOST:
            target_address = Address(host.strip("[]") or address.host, int(port))
            self._redirect = PrimaryLocation(target_address, asking=error.code == "ASK")


class SlotRange(NamedTuple):
    """A range of hash slots, and the nodes that serve it, the primary first."""

    first_slot: int
    last_slot: int
    nodes: list[Address]

    def has_primary_of(self, slot: int) -> bool:
        """Return whether the range contains `slot`, and its primary has a known host."""
        is_in_range = self.first_slot <= slot <= self.last_slot
        return is_in_range and bool(self.nodes) and self.nodes[0].host != UNKNOWN_HOST


def _parse_master(_: Address, master: list[bytes], address: list[bytes]) -> tuple[int, Address]:
    """Return the configuration epoch and the primary's address from a sentinel's replies to two commands.

    `master` is the reply to SENTINEL MASTER (keys and values alternate), `address` is the reply to SENTINEL
    GET-MASTER-ADDR-BY-NAME (host, port).
    """
    fields = dict(zip(master[::2], master[1::2], strict=True))
    return int(fields[b"config-epoch"]), Address(address[0].decode(), int(address[1]))


def _parse_slots(node: Address, entries: list[Any]) -> list[SlotRange]:
    """Parse the reply of `node` to CLUSTER SLOTS: for each range the first slot, the last slot and its nodes.

    A node that does not know its own host name reports an empty host: `node.host` is used instead.
    """

    def parse_address(host: bytes | None, port: int, *_: object) -> Address:
        return Address((host or b"").decode() or node.host, int(port))

    return [
        SlotRange(int(first), int(last), [parse_address(*address) for address in addresses])
        for first, last, *addresses in entries
    ]


async def _query_all(
    nodes: Iterable[Address], login: Login, parse: Callable[..., T], *commands: tuple[object, ...]
) -> tuple[list[T], str]:
    """Run commands on all nodes in parallel. Return the parsed replies, and the errors of the other nodes as text.

    A node that hangs causes no long delay: after the first reply, the other nodes have `FIRST_REPLY_GRACE_S` to reply,
    and after the replies of a majority `MAJORITY_GRACE_S`. Then the remaining queries are cancelled.
    """
    loop = asyncio.get_running_loop()
    pending = queries = [asyncio.ensure_future(_query(node, login, parse, *commands)) for node in nodes]
    replies: list[T] = []
    errors: list[str] = []
    deadline = loop.time() + QUERY_TIMEOUT_S
    try:
        while pending and deadline > loop.time():
            done, _ = await asyncio.wait(pending, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            done_in_order = [task for task in pending if task in done]  # in the order of the nodes: `done` is a set
            for task in done_in_order:
                error = task.exception()
                if error is None:
                    replies.append(task.result())
                elif isinstance(error, TimeoutError):
                    errors.append("no answer")
                else:
                    errors.append(describe_failure(error))
            pending = [task for task in pending if task not in done]
            if replies:
                has_majority = 2 * len(replies) > len(queries)
                grace_s = MAJORITY_GRACE_S if has_majority else FIRST_REPLY_GRACE_S
                deadline = min(deadline, loop.time() + grace_s)
        if pending and not replies:
            errors.append("no answer")
    finally:
        for task in queries:
            task.cancel()
        await asyncio.gather(*queries, return_exceptions=True)
    return replies, "; ".join(dict.fromkeys(errors))


async def _query(node: Address, login: Login, parse: Callable[..., T], *commands: tuple[object, ...]) -> T:
    """Run commands on a node over a temporary connection, and return `parse(node, *replies)`.

    Raises OSError or TimeoutError if the node is unreachable. Raises RedisFailure if a command fails, or if a reply has
    an unexpected form.
    """
    async with asyncio.timeout(QUERY_TIMEOUT_S):
        connection = await RedisConnection.open(node, login)
        try:
            replies = [await connection.call(*command) for command in commands]
        finally:
            connection.close()
    try:
        return parse(node, *replies)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise RedisFailure(f"{node} is not a sentinel or cluster node: unexpected reply to {commands[0][0]}") from None
