"""Who finds the Redis that can be written to: it is known, or sentinels know it, or the nodes of a cluster do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from redis.crc import key_slot

from genie.storage.redis.connection import ErrorReply, RedisConnection, RedisFailure
from genie.storage.redis.url import Address, Login, RedisUrl

LATEST_S = 1.5
"""How long all are given to answer who the master is."""
ANSWER_S = 0.5
"""How long the others are given when one has answered."""
MORE_S = 0.05
"""How long the rest is given when most have."""
MOST_NODES = 16
"""Nodes of a cluster that are asked at a time, of those in the URL and of those that they have named each."""
UNKNOWN = "?"
"""The host of a node that the one who was asked does not know."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrimaryLocation:
    """Where the master is. `asking`: it is about to take the slot over, and is to be told that we know."""

    address: Address
    asking: bool = False


class Discovery(Protocol):
    """Finds the master, as often as it is asked."""

    strict: bool
    """Whether it must say itself that it is one: somebody else might have become it meanwhile."""

    async def find(self) -> PrimaryLocation:
        """The present master. RedisFailure where nobody knows it."""

    def hint(self, error: ErrorReply, said_by: Address) -> None:
        """What a Redis has answered that is not the master (any more)."""


def finder(url: RedisUrl, key: str) -> Discovery:
    """The finder of a URL, for what is kept in the slot of `key`."""
    if url.kind == "sentinel":
        return SentinelDiscovery(url)
    return ClusterDiscovery(url, key) if url.kind == "cluster" else Standalone(url.nodes[0])


class Standalone:
    """One Redis, and no other."""

    strict = False

    def __init__(self, address: Address) -> None:
        self._found = PrimaryLocation(address)

    async def find(self) -> PrimaryLocation:
        """Itself."""
        return self._found

    def hint(self, error: ErrorReply, said_by: Address) -> None:
        """It does not matter what it says: there is no other."""


class SentinelDiscovery:
    """Asks all sentinels, and believes the one that has heard of the latest election."""

    strict = True

    def __init__(self, url: RedisUrl) -> None:
        self._url = url

    async def find(self) -> PrimaryLocation:
        """The master with the highest configuration epoch. One that was cut off would name an older one.

        Asked for both, a sentinel that is just replacing the master names the old one, with the epoch of the new one:
        so it is asked for the epoch, and then for the address, for which it names the new one then.
        """
        url = self._url
        commands = ("SENTINEL", "MASTER", url.master), ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.master)
        answers, errors = await _ask_all(url.nodes, url.sentinel_login, _read_master, *commands)
        if answers:
            votes = Counter(answers)
            _, address = max(votes, key=lambda said: (said[0], votes[said]))
            return PrimaryLocation(address)
        raise RedisFailure(f"no sentinel names a master {url.master!r} ({errors})")

    def hint(self, error: ErrorReply, said_by: Address) -> None:
        """They are asked each time anyway."""


class ClusterDiscovery:
    """Asks the nodes of a cluster who serves the slot, and believes the most; or a node that has just said so itself."""

    strict = True

    def __init__(self, url: RedisUrl, key: str) -> None:
        self._url = url
        self._slot = key_slot(key.encode())
        self._named: tuple[Address, ...] = ()
        """All that were named last. Those of the URL are asked beside them: they may be found again by their names when
        all others have moved."""
        self._hint: PrimaryLocation | None = None

    async def find(self) -> PrimaryLocation:
        """The node that most name as the master of the slot."""
        hint, self._hint = self._hint, None
        if hint is not None:
            return hint
        nodes = dict.fromkeys((*self._url.nodes[:MOST_NODES], *self._named[:MOST_NODES]))
        answers, errors = await _ask_all(nodes, self._url.login, _read_slots, ("CLUSTER", "SLOTS"))
        votes: Counter[Address] = Counter()
        named: dict[Address, None] = {}
        for ranges in answers:
            for first, last, servers in ranges:
                named |= dict.fromkeys(server for server in servers if server.host != UNKNOWN)
                if first <= self._slot <= last and servers and servers[0].host != UNKNOWN:
                    votes[servers[0]] += 1
        self._named = tuple(named) or self._named
        if votes:
            return PrimaryLocation(votes.most_common(1)[0][0])
        raise RedisFailure(f"no node of the cluster says who serves slot {self._slot} ({errors or 'nobody does'})")

    def hint(self, error: ErrorReply, said_by: Address) -> None:
        """`MOVED slot host:port`, or `ASK`: the node that is about to take the slot over has the keys already.

        Without a host it is that of who says so.
        """
        code, _, rest = str(error).partition(" ")
        if code not in ("MOVED", "ASK"):
            return
        host, _, port = rest.partition(" ")[2].rpartition(":")
        if port.isdecimal() and host != UNKNOWN:
            self._hint = PrimaryLocation(Address(host.strip("[]") or said_by.host, int(port)), asking=code == "ASK")


def _read_master(_: Address, master: list[bytes], address: list[bytes]) -> tuple[int, Address]:
    """The epoch and the address that a sentinel knows."""
    fields = dict(zip(master[::2], master[1::2], strict=True))
    return int(fields[b"config-epoch"]), Address(address[0].decode(), int(address[1]))


def _read_slots(who: Address, ranges: list[Any]) -> list[tuple[int, int, list[Address]]]:
    """Ranges of slots, each with its first, its last, and those who have it, the master first."""
    return [
        (int(first), int(last), [Address((host or b"").decode() or who.host, int(port)) for host, port, *_ in servers])
        for first, last, *servers in ranges
    ]


async def _ask_all(
    nodes: Iterable[Address], login: Login, read: Callable[..., T], *commands: tuple[object, ...]
) -> tuple[list[T], str]:
    """Ask everybody at the same time, and go on soon after most have answered: one that hangs holds nobody up.

    Returns the answers, and what went wrong with the others.
    """
    loop = asyncio.get_running_loop()
    waiting = asked = [asyncio.ensure_future(_ask(node, login, read, *commands)) for node in nodes]
    answers: list[T] = []
    errors: dict[str, None] = {}
    until = loop.time() + LATEST_S
    try:
        while waiting and until > loop.time():
            done, _ = await asyncio.wait(waiting, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task in done]:  # in order, which a set is not
                error = task.exception()
                if error is None:
                    answers.append(task.result())
                else:
                    errors["no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__] = (
                        None
                    )
            waiting = [task for task in waiting if task not in done]
            if answers:
                until = min(until, loop.time() + (MORE_S if 2 * len(answers) > len(asked) else ANSWER_S))
        if waiting and not answers:
            errors["no answer"] = None
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return answers, "; ".join(errors)


async def _ask(node: Address, login: Login, read: Callable[..., T], *commands: tuple[object, ...]) -> T:
    async with asyncio.timeout(LATEST_S):
        link = await RedisConnection.open(node, login)
        try:
            said = [await link.call(*command) for command in commands]
        finally:
            link.close()
    try:
        return read(node, *said)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise RedisFailure(f"{node} does not say what a sentinel or a node of a cluster would") from None
