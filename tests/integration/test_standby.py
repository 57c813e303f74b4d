"""Several servers, one namespace: who leads, who follows, and who takes over."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from servers import Genie, Redis, running_server
from wire import Wire

SECRET = "a secret that nobody can guess"  # noqa: S105 - it guards nothing


@contextmanager
def pair(redis: Redis, lease: float = 60, **settings: object) -> Iterator[tuple[Genie, Genie]]:
    """A leader with a lease that may be waited for, and one that follows it, and keeps the lead when it has it."""
    with (
        running_server(redis, lease=lease, **settings) as leader,
        running_server(redis, lease=60, **settings) as follower,
    ):
        assert follower.log[-1]["role"] == "follower"
        follower.until("replica caught up")
        yield leader, follower


async def hello(genie: Genie) -> tuple[Wire, bool]:
    client = await Wire.connect(genie.address)
    client.send("hello", session=SECRET, sessionTimeout=60_000)
    return client, (await client.expect("welcome"))["resumed"]


async def test_a_follower_says_who_leads(redis: Redis) -> None:
    with pair(redis) as (leader, follower):
        client = await Wire.connect(follower.address)
        address = f"127.0.0.1:{leader.port}"
        for command, payload in [
            ("hello", {"session": SECRET}),
            ("hello", {"session": "short"}),
            ("hello", {"protocol": 2}),
            ("request", {"resources": ["no mode"], "ref": "r"}),
            ("fly", {}),
            ("request", {"resources": ["exclusive:a"], "ref": "r"}),
            ("release", {"id": 7}),
            ("ping", {}),
            ("inspect", {}),
        ]:
            client.send(command, **payload)
            told = await client.expect("error")
            assert (told["code"], told["leader"]) == ("unavailable", address)
            assert told.get("ref") == payload.get("ref")
            assert told.get("id") == payload.get("id")
            assert address in told["message"]
        client.raw(b"\n\nnonsense\n")
        assert (await client.expect("error"))["code"] == "bad-json"
        client.writer.write_eof()
        assert await client.receive() == ("closed", {})
        await client.close()


async def test_what_is_measured_is_the_leader(redis: Redis) -> None:
    with pair(redis) as (_, follower):
        done = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "genie.cli", "bench", "own", "--seconds", "1", "--warm-up", "0"),
            *("--port", str(follower.port)),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await done.communicate()
        assert done.returncode == 0, said
        assert b"errors: none" in said


async def test_the_address_for_clients_can_be_told(redis: Redis) -> None:
    with running_server(redis, lease=60, advertise="genie.example:7077"), running_server(redis) as follower:
        client = await Wire.connect(follower.address)
        client.send("ping")
        assert (await client.expect("error"))["leader"] == "genie.example:7077"
        await client.close()


async def test_who_asked_for_a_session_in_vain_is_not_served_without(redis: Redis) -> None:
    with pair(redis) as (leader, follower):
        client = await Wire.connect(follower.address)
        client.send("hello", session=SECRET)
        assert (await client.expect("error"))["code"] == "unavailable"
        leader.send(signal.SIGTERM)
        follower.until("leadership acquired")
        client.send("request", resources=["exclusive:a"], ref="r")
        told = await client.expect("error")
        assert (told["code"], told["ref"]) == ("unavailable", "r")
        client.send("hello", session=SECRET)
        await client.expect("welcome")
        await client.lock("exclusive:a")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_follower_takes_over(redis: Redis, end: signal.Signals) -> None:
    with pair(redis, lease=3) as (leader, follower):
        client, _ = await hello(leader)
        early = await client.lock("exclusive:a", transactionTimeout=600_000)
        fence = (await locked(client, "exclusive:z"))["fence"]
        waiting = await client.request("exclusive:a", queueTimeout=600_000, ref="w")
        idle = await Wire.connect(follower.address)
        leader.send(end)
        assert leader.wait() in (0, -signal.SIGKILL)
        assert follower.until("leadership acquired")["held"] == 2
        again, resumed = await hello(follower)
        assert resumed
        assert {(await again.receive())[1]["id"] for _ in range(3)} > {early, waiting}
        assert await again.release(early) == "success"
        told = await again.expect("locked")
        assert (told["id"], told["ref"]) == (waiting, "w")
        assert told["fence"] > fence
        idle.send("ping")
        await idle.expect("pong")
        leader.start()
        assert leader.log[-1]["role"] == "follower"
        for wire in (client, again, idle):
            await wire.close()


async def locked(client: Wire, resource: str) -> dict[str, int]:
    await client.request(resource, transactionTimeout=600_000)
    return await client.expect("locked")


async def test_the_same_server_takes_its_own_lease_at_once(redis: Redis) -> None:
    with running_server(redis, lease=600) as genie:
        client = await Wire.connect(genie.address)
        id_ = await client.lock("exclusive:a", transactionTimeout=600_000)
        genie.kill()
        genie.start()
        client = await Wire.connect(genie.address)
        assert await client.release(id_) == "success"
        await client.close()


async def test_a_leader_that_was_stopped_says_nothing_more(redis: Redis) -> None:
    with pair(redis, lease=2) as (leader, follower):
        client, bystander = await Wire.connect(leader.address), await Wire.connect(leader.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        leader.send(signal.SIGSTOP)
        follower.until("leadership acquired")
        client.send("request", resources=["exclusive:b"])
        bystander.send("ping")
        new = await Wire.connect(follower.address)
        assert await new.release(held) == "success"
        await new.lock("exclusive:a")
        leader.send(signal.SIGCONT)
        for wire in (client, bystander):
            with contextlib.suppress(ConnectionResetError):  # what it had said is not even read
                assert await wire.receive() == ("closed", {})
        leader.until("leadership lost")
        assert leader.until("leader changed")["leader"] == f"127.0.0.1:{follower.port}"
        late = await Wire.connect(leader.address)
        late.send("ping")
        assert (await late.expect("error"))["leader"] == f"127.0.0.1:{follower.port}"
        follower.send(signal.SIGTERM)
        leader.until("leadership acquired")
        late.send("ping")
        await late.expect("pong")
        for wire in (client, bystander, new, late):
            await wire.close()


async def test_a_leader_that_can_t_commit_steps_down_and_comes_back(redis: Redis) -> None:
    with pair(redis, lease=2, store_timeout_ms=100) as (leader, follower):
        client, _ = await hello(leader)
        id_ = await client.lock("exclusive:a", transactionTimeout=600_000)
        redis.send(signal.SIGSTOP)
        assert await client.receive() == ("closed", {})
        leader.until("leadership lost")
        refused = await Wire.connect(leader.address)
        refused.send("ping")
        told = await refused.expect("error")
        assert told["code"] == "unavailable"
        assert "leader" not in told
        redis.send(signal.SIGCONT)
        leader.until("leadership acquired")
        again, resumed = await hello(leader)
        assert resumed
        assert (await again.expect("locked"))["id"] == id_
        check = await Wire.connect(follower.address)
        check.send("ping")
        assert (await check.expect("error"))["leader"] == f"127.0.0.1:{leader.port}"
        for wire in (client, refused, again, check):
            await wire.close()


async def test_who_had_to_step_down_still_knows_what_it_told(redis: Redis) -> None:
    with running_server(redis) as genie:
        client, _ = await hello(genie)
        old = await client.lock("exclusive:old", transactionTimeout=600_000)
        shutil.copytree(redis.folder / "appendonlydir", redis.folder / "kept")
        new = await client.lock("exclusive:new", transactionTimeout=600_000)
        assert await client.release(old) == "success"
        redis.kill()
        genie.until("leadership lost")
        shutil.rmtree(redis.folder / "appendonlydir")
        shutil.move(redis.folder / "kept", redis.folder / "appendonlydir")
        redis.start()
        assert genie.until("leadership acquired")["held"] == 1
        again, resumed = await hello(genie)
        assert resumed
        assert (await again.expect("locked"))["id"] == new
        assert set(map(int, redis.call("HKEYS", redis.call("HGET", "{genie}:meta", "records")))) == {0, new}


async def test_a_new_namespace_is_waited_for(redis: Redis) -> None:
    with running_server(redis, lease=60) as leader:
        redis.call("FLUSHALL")
        follower = Genie(redis, lease=60)
        try:
            follower.start()
            assert follower.log[-1]["role"] == "follower", "the leader lives, and has written it anew"
        finally:
            follower.kill()
        client = await Wire.connect(leader.address)
        await client.lock("exclusive:a")
        await client.close()


def blocked(redis: Redis) -> bool:
    return int(redis.call("INFO", "clients")["blocked_clients"]) > 0


async def test_what_redis_lost_with_its_leader_a_follower_has_seen(redis: Redis) -> None:
    with running_server(redis, lease=60) as leader, running_server(redis, lease=2) as follower:
        follower.until("replica caught up")
        client = await Wire.connect(leader.address)
        id_ = await client.lock("exclusive:a", transactionTimeout=600_000)
        while not blocked(redis):  # noqa: ASYNC110 - Redis has no event for it
            await asyncio.sleep(0.005)  # it has read all there is when it waits for more
        leader.kill()
        redis.call("FLUSHALL")
        assert follower.until("leadership acquired")["held"] == 1
        again = await Wire.connect(follower.address)
        assert await again.release(id_) == "success"
        for wire in (client, again):
            await wire.close()


async def test_a_follower_behind_the_journal_reads_the_records(redis: Redis) -> None:
    with pair(redis) as (leader, follower):
        client = await Wire.connect(leader.address)
        first = await client.lock("exclusive:first", transactionTimeout=600_000)
        follower.send(signal.SIGSTOP)
        ids = [await client.lock(f"exclusive:{number}", transactionTimeout=600_000) for number in range(20)]
        for id_ in ids[::2]:
            await client.release(id_)
        assert int(redis.call("XTRIM", "{genie}:log", "MAXLEN", "5")) > 0
        follower.send(signal.SIGCONT)
        follower.until("log truncated")
        last = await client.lock("exclusive:last", transactionTimeout=600_000)
        leader.send(signal.SIGTERM)
        assert follower.until("leadership acquired")["held"] == 12
        again = await Wire.connect(follower.address)
        for id_ in [first, *ids[1::2], last]:
            assert await again.release(id_) == "success"
        for wire in (client, again):
            await wire.close()
