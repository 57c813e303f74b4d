"""Whom sentinels and nodes of a cluster are believed, against servers that say what they are told to say."""

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
from ports import free_port
from relay import Command, Relay, Rule, encoded, error, relay
from servers import WAIT_S

KEY = "{genie}:meta"
SLOT = key_slot(KEY.encode())
HERE = "127.0.0.1"
Script = Callable[[Command], bytes | None]
Server = Script | None
"""None is not there at all."""


def hangs(_: Command) -> None:
    """No answer, ever."""


def refuses(text: str) -> Script:
    return lambda _: error(text)


def says(value: object) -> Script:
    return lambda _: encoded(value)


@pytest.fixture(autouse=True)
def _long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes is waited for, however slow the machine is."""
    monkeypatch.setattr(discovery, "QUERY_TIMEOUT_S", WAIT_S)


def wait_for_all(monkeypatch: pytest.MonkeyPatch, servers: list[Server]) -> None:
    """Nobody's answer may be left out of what is believed; but one who hangs is not waited for."""
    if hangs not in servers:
        monkeypatch.setattr(discovery, "FIRST_REPLY_GRACE_S", WAIT_S)
        monkeypatch.setattr(discovery, "MAJORITY_GRACE_S", WAIT_S)


@asynccontextmanager
async def running(*servers: Server) -> AsyncIterator[tuple[list[Relay], str]]:
    """Each of them, and where they are as it is written in a URL."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(relay(0, script)) for script in servers if script is not None]
        ports = iter([one.port for one in made])
        yield made, ",".join(f"{HERE}:{free_port() if script is None else next(ports)}" for script in servers)


# -- sentinels ------------------------------------------------------------------------------------------------


def sentinel(epoch: int, host: str, port: int, named: str | None = None) -> Script:
    """One that knows a master, and for clients perhaps another."""

    def script(command: Command) -> bytes:
        assert command[2] == b"locks"
        if command[1] == b"MASTER":
            return encoded(
                ["name", "locks", "ip", host, "port", str(port), "config-epoch", str(epoch), "flags", "master"]
            )
        assert command[1] == b"GET-MASTER-ADDR-BY-NAME"
        return encoded([named or host, str(port)])

    return script


UNKNOWN_MASTER = refuses("ERR No such master with that name")
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
        [NEW, says([]), says(None), says(7), says(["config-epoch", "x"])],
        [OLD, sentinel(4, "old", 1, named="new"), OLD],
        [sentinel(4, "zzz", 1), NEW, NEW],
        [hangs, NEW, OLD],
    ],
    ids=["one", "two are stale", "the first knows", "by number", "others are dead", "others know nobody", "others talk nonsense",
         "it is just being replaced", "most of one epoch", "one hangs"],
)  # fmt: skip
async def test_the_sentinel_that_knows_the_latest_election_is_followed(
    monkeypatch: pytest.MonkeyPatch, servers: list[Server]
) -> None:
    wait_for_all(monkeypatch, servers)
    async with running(*servers) as (_, places):
        asked = discovery_for(RedisUrl.parse(f"redis+sentinel://{places}/locks"), KEY)
        assert asked.primary_may_change
        assert await asked.find() == PrimaryLocation(Address("new", 1))


@pytest.mark.parametrize(
    ("servers", "reason"),
    [
        ([None], "refused|Connect"),
        ([UNKNOWN_MASTER, None], "No such master"),
        ([says([])], "is no sentinel or cluster node: unexpected reply to SENTINEL"),
        ([refuses("NOAUTH Authentication required.")], "NOAUTH"),
        ([refuses("ERR unknown command 'SENTINEL', with args beginning with: 'MASTER'")], "unknown command"),
        ([hangs, UNKNOWN_MASTER], "No such master.*no answer|no answer.*No such master"),
    ],
)
async def test_no_sentinel_knows_the_primary(
    monkeypatch: pytest.MonkeyPatch, servers: list[Server], reason: str
) -> None:
    if hangs in servers:
        monkeypatch.setattr(discovery, "QUERY_TIMEOUT_S", 1.0)
    async with running(*servers) as (_, places):
        with pytest.raises(RedisFailure, match=f"no sentinel reports a master named 'locks'.*({reason})"):
            await discovery_for(RedisUrl.parse(f"redis+sentinel://{places}/locks"), KEY).find()


async def test_a_late_answer_is_waited_for_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIRST_REPLY_GRACE_S", 0.05)
    async with running(UNKNOWN_MASTER, NEW, None) as (made, places):
        held = made[1].rule(Rule("SENTINEL", encoded(["config-epoch", "4"]), held=asyncio.Event()))
        finding = asyncio.create_task(discovery_for(RedisUrl.parse(f"redis+sentinel://{places}/locks"), KEY).find())
        await held.met.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(finding), 0.1)  # beyond the time that all are given
        assert held.held is not None
        held.held.set()
        assert await finding == PrimaryLocation(Address("new", 1))


async def test_sentinels_are_logged_in_to_with_their_own_password() -> None:
    def script(command: Command) -> bytes | None:
        return b"+OK\r\n" if command[0] == b"AUTH" else NEW(command)

    async with running(script, script) as (made, places):
        url = f"redis+sentinel://me:one@{places.split(',')[0]}/locks/3?sentinel_username=you&sentinel_password=two"
        await discovery_for(RedisUrl.parse(url), KEY).find()
        assert made[0].seen[0][1] == (b"AUTH", b"you", b"two")
        await discovery_for(RedisUrl.parse(f"redis+sentinel://me:one@{places.split(',')[1]}/locks/3"), KEY).find()
        assert made[1].names() == ["SENTINEL", "SENTINEL"], "no password, and no database"


# -- a cluster ------------------------------------------------------------------------------------------------


def slots(*masters: tuple[str | None, int]) -> Script:
    """A node to which the first one has the slot, and the second all others."""
    first, other = [[host, port, "id"] for host, port in (*masters, ("other", 1))[:2]]
    ranges = [[0, SLOT - 1, other], [SLOT, SLOT, first, ["replica", 5, "id", []]], [SLOT + 1, 16_383, other]]
    return says(ranges)


@pytest.mark.parametrize(
    "servers",
    [
        [slots(("new", 1))],
        [slots(("old", 1)), slots(("new", 1)), slots(("new", 1))],
        [slots(("new", 1)), slots(("old", 1)), slots(("new", 1)), None],
        [None, slots(("new", 1)), refuses("ERR This instance has cluster support disabled"), says(7), says([[1]])],
        [slots(("?", 1)), says([]), slots(("new", 1))],
        [hangs, slots(("new", 1))],
    ],
    ids=["one", "most", "one is stale, one dead", "others talk nonsense", "others do not know", "one hangs"],
)
async def test_the_majority_of_nodes_is_followed(monkeypatch: pytest.MonkeyPatch, servers: list[Server]) -> None:
    wait_for_all(monkeypatch, servers)
    async with running(*servers) as (_, places):
        asked = discovery_for(RedisUrl.parse(f"redis+cluster://{places}"), KEY)
        assert asked.primary_may_change
        assert await asked.find() == PrimaryLocation(Address("new", 1))


@pytest.mark.parametrize("host", ["", None])
async def test_a_node_that_does_not_know_its_own_name_is_where_it_was_asked(host: str | None) -> None:
    async with running(slots((host, 77))) as (_, places):
        assert await discovery_for(RedisUrl.parse(f"redis+cluster://{places}"), KEY).find() == PrimaryLocation(
            Address(HERE, 77)
        )


@pytest.mark.parametrize("servers", [[says([])], [None], [slots(("?", 1))]])
async def test_no_node_serves_the_slot(servers: list[Server]) -> None:
    async with running(*servers) as (_, places):
        with pytest.raises(RedisFailure, match=f"reports a server for slot {SLOT}"):
            await discovery_for(RedisUrl.parse(f"redis+cluster://{places}"), KEY).find()


async def test_nodes_that_were_named_are_asked_and_those_of_the_url_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_QUERIED_NODES", 2)
    async with running(slots((HERE, 1)), slots((HERE, 1))) as ((seed, named), _):
        seed._script = slots((HERE, named.port), ("gone", 1))
        asked = discovery_for(RedisUrl.parse(f"redis+cluster://{HERE}:{seed.port}"), KEY)
        assert await asked.find() == PrimaryLocation(Address(HERE, named.port))
        assert named.seen == []
        seed._script = refuses("LOADING Redis is loading the dataset in memory")
        named._script = says([[0, 16_383, [f"gone-{number}.invalid", 1, "id"]] for number in range(9)])
        await asked.find()
        assert named.seen, "the first one is not needed any more"
        seed._script = slots(("again", 7))
        assert await asked.find() == PrimaryLocation(Address("again", 7)), "all that were named are gone"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MOVED 3999 10.0.0.1:6381", PrimaryLocation(Address("10.0.0.1", 6381))),
        ("ASK 3999 10.0.0.1:6381", PrimaryLocation(Address("10.0.0.1", 6381), asking=True)),
        ("MOVED 3999 a.example:6381", PrimaryLocation(Address("a.example", 6381))),
        ("MOVED 3999 fd00::1:6381", PrimaryLocation(Address("fd00::1", 6381))),
        ("MOVED 3999 [fd00::1]:6381", PrimaryLocation(Address("fd00::1", 6381))),
        ("MOVED 3999 :6381", PrimaryLocation(Address("who.said.it", 6381))),
        ("ASK 3999 :6381", PrimaryLocation(Address("who.said.it", 6381), asking=True)),
        ("MOVED 3999 ?:6381", None),
        ("MOVED 3999", None),
        ("MOVED", None),
        ("MOVED 3999 a:b", None),
        ("TRYAGAIN Multiple keys request during rehashing of slot", None),
        ("ERR MOVED 3999 10.0.0.1:6381", None),
    ],
)
async def test_a_redirection_is_followed_once(text: str, found: PrimaryLocation | None) -> None:
    async with running(slots(("asked", 1))) as (_, places):
        asked = discovery_for(RedisUrl.parse(f"redis+cluster://{places}"), KEY)
        asked.on_error_reply(ErrorReply(text), Address("who.said.it", 1))
        assert await asked.find() == (found or PrimaryLocation(Address("asked", 1)))
        assert await asked.find() == PrimaryLocation(Address("asked", 1))


async def test_a_standalone_redis_is_always_the_primary() -> None:
    asked = discovery_for(RedisUrl.parse("redis://one:7"), KEY)
    asked.on_error_reply(ErrorReply("MOVED 3999 10.0.0.1:6381"), Address("one", 7))
    assert await asked.find() == PrimaryLocation(Address("one", 7))
    assert not asked.primary_may_change
