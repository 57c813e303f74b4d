"""Discovery of the primary, with scripted sentinels and cluster nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from redis.crc import key_slot

from genie.storage.redis import discovery
from genie.storage.redis.connection import ErrorReply, RedisFailure
from genie.storage.redis.discovery import PrimaryLocation, discovery_for
from genie.storage.redis.url import Address, RedisUrl
from support.processes.ports import free_port
from support.processes.servers import WAIT_S
from support.storage.relay import Command, Relay, Rule, encoded, error, relay

KEY = "{genie}:meta"
SLOT = key_slot(KEY.encode())
HERE = "127.0.0.1"
Script = Callable[[Command], bytes | None]
Server = Script | None
"""None: nothing listens at its address."""


def hangs(_: Command) -> None:
    """Never reply."""


def rejects(text: str) -> Script:
    return lambda _: error(text)


def replies(value: object) -> Script:
    return lambda _: encoded(value)


@pytest.fixture(autouse=True)
def _long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for every reply, however slow the machine is."""
    monkeypatch.setattr(discovery, "QUERY_TIMEOUT_S", WAIT_S)


def wait_for_all(monkeypatch: pytest.MonkeyPatch, servers: list[Server]) -> None:
    """Wait for the replies of all servers, unless one of them hangs."""
    if hangs not in servers:
        monkeypatch.setattr(discovery, "FIRST_REPLY_GRACE_S", WAIT_S)
        monkeypatch.setattr(discovery, "MAJORITY_GRACE_S", WAIT_S)


@asynccontextmanager
async def running(*servers: Server) -> AsyncIterator[tuple[list[Relay], str]]:
    """Run the servers; return the running ones, and the addresses of all as in a URL."""
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(relay(0, script)) for script in servers if script is not None]
        ports = iter([relay_.port for relay_ in relays])
        yield relays, ",".join(f"{HERE}:{free_port() if script is None else next(ports)}" for script in servers)


# -- sentinels ------------------------------------------------------------------------------------------------


def sentinel(epoch: int, host: str, port: int, named: str | None = None) -> Script:
    """Return a sentinel whose reply to MASTER has `host`, and that to GET-MASTER-ADDR-BY-NAME `named` if given."""

    def script(command: Command) -> bytes:
        assert command[2] == b"locks"
        if command[1] == b"MASTER":
            return encoded(
                ["name", "locks", "ip", host, "port", str(port), "config-epoch", str(epoch), "flags", "master"]
            )
        assert command[1] == b"GET-MASTER-ADDR-BY-NAME"
        return encoded([named or host, str(port)])

    return script


UNKNOWN_MASTER = rejects("ERR No such master with that name")
OLD, NEW = sentinel(3, "old", 1), sentinel(4, "new", 1)


@pytest.mark.parametrize(
    "servers",
    [
        [NEW],
        [OLD, NEW, OLD],
        [NEW, OLD, OLD],
        [sentinel(9, "z", 1), sentinel(10, "new", 1)],
        [None, NEW, None],
        [UNKNOWN_MASTER, NEW, UNKNOWN_MASTER],
        [NEW, replies([]), replies(None), replies(7), replies(["config-epoch", "x"])],
        [OLD, sentinel(4, "old", 1, named="new"), OLD],
        [sentinel(4, "zzz", 1), NEW, NEW],
        [hangs, NEW, OLD],
    ],
    ids=["one", "two are stale", "the first knows", "by number", "others are dead", "others know nobody", "others talk nonsense",
         "it is just being replaced", "most of one epoch", "one hangs"],
)  # fmt: skip
async def test_the_reply_with_the_highest_epoch_wins(monkeypatch: pytest.MonkeyPatch, servers: list[Server]) -> None:
    wait_for_all(monkeypatch, servers)
    async with running(*servers) as (_, addresses):
        finder = discovery_for(RedisUrl.parse(f"redis+sentinel://{addresses}/locks"), KEY)
        assert finder.primary_may_change
        assert await finder.find() == PrimaryLocation(Address("new", 1))


@pytest.mark.parametrize(
    ("servers", "reason"),
    [
        ([None], "refused|Connect"),
        ([UNKNOWN_MASTER, None], "No such master"),
        ([replies([])], "is not a sentinel or cluster node: unexpected reply to SENTINEL"),
        ([rejects("NOAUTH Authentication required.")], "NOAUTH"),
        ([rejects("ERR unknown command 'SENTINEL', with args beginning with: 'MASTER'")], "unknown command"),
        ([hangs, UNKNOWN_MASTER], "No such master.*no answer|no answer.*No such master"),
    ],
)
async def test_an_error_says_why_no_sentinel_reports_the_primary(
    monkeypatch: pytest.MonkeyPatch, servers: list[Server], reason: str
) -> None:
    if hangs in servers:
        monkeypatch.setattr(discovery, "QUERY_TIMEOUT_S", 1.0)
    async with running(*servers) as (_, addresses):
        with pytest.raises(RedisFailure, match=f"no sentinel reports a master named 'locks'.*({reason})"):
            await discovery_for(RedisUrl.parse(f"redis+sentinel://{addresses}/locks"), KEY).find()


async def test_without_another_reply_a_late_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIRST_REPLY_GRACE_S", 0.05)
    async with running(UNKNOWN_MASTER, NEW, None) as (relays, addresses):
        held = relays[1].rule(Rule("SENTINEL", encoded(["config-epoch", "4"]), held=asyncio.Event()))
        finding = asyncio.create_task(discovery_for(RedisUrl.parse(f"redis+sentinel://{addresses}/locks"), KEY).find())
        await held.met.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(finding), 0.1)  # longer than the grace after a first reply
        assert held.held is not None
        held.held.set()
        assert await finding == PrimaryLocation(Address("new", 1))


async def test_sentinels_get_their_own_credentials() -> None:
    def script(command: Command) -> bytes | None:
        return b"+OK\r\n" if command[0] == b"AUTH" else NEW(command)

    async with running(script, script) as (relays, addresses):
        url = f"redis+sentinel://me:one@{addresses.split(',')[0]}/locks/3?sentinel_username=you&sentinel_password=two"
        await discovery_for(RedisUrl.parse(url), KEY).find()
        assert relays[0].seen[0][1] == (b"AUTH", b"you", b"two")
        await discovery_for(RedisUrl.parse(f"redis+sentinel://me:one@{addresses.split(',')[1]}/locks/3"), KEY).find()
        assert relays[1].names() == ["SENTINEL", "SENTINEL"], "no password, and no database"


# -- a cluster ------------------------------------------------------------------------------------------------


def slots(*masters: tuple[str | None, int]) -> Script:
    """Return a cluster node that reports the first of `masters` as the server of SLOT, the second of all other slots."""
    first, other = [[host, port, "id"] for host, port in (*masters, ("other", 1))[:2]]
    ranges = [[0, SLOT - 1, other], [SLOT, SLOT, first, ["replica", 5, "id", []]], [SLOT + 1, 16_383, other]]
    return replies(ranges)


@pytest.mark.parametrize(
    "servers",
    [
        [slots(("new", 1))],
        [slots(("old", 1)), slots(("new", 1)), slots(("new", 1))],
        [slots(("new", 1)), slots(("old", 1)), slots(("new", 1)), None],
        [
            None,
            slots(("new", 1)),
            rejects("ERR This instance has cluster support disabled"),
            replies(7),
            replies([[1]]),
        ],
        [slots(("?", 1)), replies([]), slots(("new", 1))],
        [hangs, slots(("new", 1))],
    ],
    ids=["one", "most", "one is stale, one dead", "others reply with errors", "others report nothing", "one hangs"],
)
async def test_the_majority_of_the_cluster_nodes_wins(monkeypatch: pytest.MonkeyPatch, servers: list[Server]) -> None:
    wait_for_all(monkeypatch, servers)
    async with running(*servers) as (_, addresses):
        finder = discovery_for(RedisUrl.parse(f"redis+cluster://{addresses}"), KEY)
        assert finder.primary_may_change
        assert await finder.find() == PrimaryLocation(Address("new", 1))


@pytest.mark.parametrize("host", ["", None])
async def test_a_node_without_a_host_is_the_one_that_replied(host: str | None) -> None:
    async with running(slots((host, 77))) as (_, addresses):
        assert await discovery_for(RedisUrl.parse(f"redis+cluster://{addresses}"), KEY).find() == PrimaryLocation(
            Address(HERE, 77)
        )


@pytest.mark.parametrize("servers", [[replies([])], [None], [slots(("?", 1))]])
async def test_an_error_says_that_no_node_serves_the_slot(servers: list[Server]) -> None:
    async with running(*servers) as (_, addresses):
        with pytest.raises(RedisFailure, match=f"reports a primary for slot {SLOT}"):
            await discovery_for(RedisUrl.parse(f"redis+cluster://{addresses}"), KEY).find()


async def test_reported_nodes_are_queried_and_always_those_of_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_QUERIED_NODES", 2)
    async with running(slots((HERE, 1)), slots((HERE, 1))) as ((seed, named), _):
        seed._script = slots((HERE, named.port), ("gone", 1))
        finder = discovery_for(RedisUrl.parse(f"redis+cluster://{HERE}:{seed.port}"), KEY)
        assert await finder.find() == PrimaryLocation(Address(HERE, named.port))
        assert named.seen == []
        seed._script = rejects("LOADING Redis is loading the dataset in memory")
        named._script = replies([[0, 16_383, [f"gone-{number}.invalid", 1, "id"]] for number in range(9)])
        await finder.find()
        assert named.seen, "the node of the URL is not needed any more"
        seed._script = slots(("again", 7))
        assert await finder.find() == PrimaryLocation(Address("again", 7)), "all reported nodes are gone"


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("MOVED 3999 10.0.0.1:6381", PrimaryLocation(Address("10.0.0.1", 6381))),
        ("ASK 3999 10.0.0.1:6381", PrimaryLocation(Address("10.0.0.1", 6381), asking=True)),
        ("MOVED 3999 a.example:6381", PrimaryLocation(Address("a.example", 6381))),
        ("MOVED 3999 fd00::1:6381", PrimaryLocation(Address("fd00::1", 6381))),
        ("MOVED 3999 [fd00::1]:6381", PrimaryLocation(Address("fd00::1", 6381))),
        ("MOVED 3999 :6381", PrimaryLocation(Address("replying.host", 6381))),
        ("ASK 3999 :6381", PrimaryLocation(Address("replying.host", 6381), asking=True)),
        ("MOVED 3999 ?:6381", None),
        ("MOVED 3999", None),
        ("MOVED", None),
        ("MOVED 3999 a:b", None),
        ("TRYAGAIN Multiple keys request during rehashing of slot", None),
        ("ERR MOVED 3999 10.0.0.1:6381", None),
    ],
)
async def test_a_redirection_is_followed_once(text: str, location: PrimaryLocation | None) -> None:
    async with running(slots(("asked", 1))) as (_, addresses):
        finder = discovery_for(RedisUrl.parse(f"redis+cluster://{addresses}"), KEY)
        finder.on_error_reply(ErrorReply(text), Address("replying.host", 1))
        assert await finder.find() == (location or PrimaryLocation(Address("asked", 1)))
        assert await finder.find() == PrimaryLocation(Address("asked", 1))


async def test_a_standalone_redis_is_always_the_primary() -> None:
    finder = discovery_for(RedisUrl.parse("redis://one:7"), KEY)
    finder.on_error_reply(ErrorReply("MOVED 3999 10.0.0.1:6381"), Address("one", 7))
    assert await finder.find() == PrimaryLocation(Address("one", 7))
    assert not finder.primary_may_change
