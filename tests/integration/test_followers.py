"""Followers of one namespace: redirects, takeover, and restoring what Redis lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.network.wire import Wire
from support.processes.servers import Genie, Redis, running_server
from support.processes.waiting import until
from support.storage.stores import checkpoint_written, stored_records

SECRET = "a-secret-of-the-tests"  # noqa: S105 - not a real secret


@contextmanager
def leader_and_follower(redis: Redis, lease: float = 60, **settings: object) -> Iterator[tuple[Genie, Genie]]:
    """Start a leader with this lease and a follower with a long one, so that it stays leader after it takes over."""
    with (
        running_server(redis, lease=lease, **settings) as leader,
        running_server(redis, lease=60, **settings) as follower,
    ):
        assert follower.log[-1]["role"] == "follower"
        follower.until("replica loaded")
        yield leader, follower


async def connect_with_session(genie: Genie) -> tuple[Wire, bool]:
    client = await Wire.connect(genie.address)
    client.send("hello", session=SECRET, sessionTimeout=60_000)
    return client, (await client.expect("welcome"))["resumed"]


async def test_a_follower_rejects_every_command_with_the_address_of_the_leader(redis: Redis) -> None:
    with leader_and_follower(redis) as (leader, follower):
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
            message = await client.expect("error")
            assert (message["code"], message["leader"]) == ("unavailable", address)
            assert message.get("ref") == payload.get("ref")
            assert message.get("id") == payload.get("id")
            assert address in message["message"]
        client.raw(b"\n\nnonsense\n")
        assert (await client.expect("error"))["code"] == "bad-json"
        client.writer.write_eof()
        assert await client.receive() == ("closed", {})
        await client.close()


async def test_a_benchmark_started_at_a_follower_measures_the_leader(redis: Redis) -> None:
    with leader_and_follower(redis) as (_, follower):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "genie.cli", "bench", "own", "--seconds", "1", "--warm-up", "0"),
            *("--port", str(follower.port)),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output
        assert b"errors: none" in output


async def test_the_advertised_address_is_sent_to_clients(redis: Redis) -> None:
    with running_server(redis, lease=60, advertise="genie.example:7077"), running_server(redis) as follower:
        client = await Wire.connect(follower.address)
        client.send("ping")
        assert (await client.expect("error"))["leader"] == "genie.example:7077"
        await client.close()


async def test_after_a_rejected_hello_commands_are_not_executed_without_the_session(redis: Redis) -> None:
    with leader_and_follower(redis) as (leader, follower):
        client = await Wire.connect(follower.address)
        client.send("hello", session=SECRET)
        assert (await client.expect("error"))["code"] == "unavailable"
        leader.send(signal.SIGTERM)
        follower.until("leadership acquired")
        client.send("request", resources=["exclusive:a"], ref="r")
        message = await client.expect("error")
        assert (message["code"], message["ref"]) == ("unavailable", "r")
        client.send("hello", session=SECRET)
        await client.expect("welcome")
        await client.lock("exclusive:a")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_follower_takes_over(redis: Redis, end: signal.Signals) -> None:
    with leader_and_follower(redis, lease=3) as (leader, follower):
        client, _ = await connect_with_session(leader)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        fence = (await locked(client, "exclusive:z"))["fence"]
        waiting = await client.request("exclusive:a", queueTimeout=600_000, ref="w")
        idle = await Wire.connect(follower.address)
        leader.send(end)
        assert leader.wait() in (0, -signal.SIGKILL)
        assert follower.until("leadership acquired")["held_locks"] == 2
        next_client, resumed = await connect_with_session(follower)
        assert resumed
        assert {(await next_client.receive())[1]["id"] for _ in range(3)} > {held, waiting}
        assert await next_client.release(held) == "success"
        message = await next_client.expect("locked")
        assert (message["id"], message["ref"]) == (waiting, "w")
        assert message["fence"] > fence
        idle.send("ping")
        await idle.expect("pong")
        leader.start()
        assert leader.log[-1]["role"] == "follower"
        for wire in (client, next_client, idle):
            await wire.close()


async def locked(client: Wire, resource: str) -> dict[str, int]:
    await client.request(resource, transactionTimeout=600_000)
    return await client.expect("locked")


async def test_units_and_subtrees_are_granted_by_the_next_leader_as_by_the_former(redis: Redis) -> None:
    with leader_and_follower(redis, lease=3) as (leader, follower):
        client, _ = await connect_with_session(leader)
        units = await client.lock("2/3:pool", transactionTimeout=600_000)
        subtree = await client.lock("exclusive:a/**", transactionTimeout=600_000)
        resources = ["shared:a/1", "2/3:pool", "exclusive:**", "shared:a/2"]
        waiting = [await client.request(resource, queueTimeout=600_000) for resource in resources]
        leader.send(signal.SIGKILL)
        assert leader.wait() == -signal.SIGKILL
        assert follower.until("leadership acquired")["held_locks"] == 2
        successor, resumed = await connect_with_session(follower)
        assert resumed
        assert {(await successor.receive())[1]["id"] for _ in range(6)} == {units, subtree, *waiting}
        for ended, granted in ((subtree, waiting[0]), (units, waiting[1]), (waiting[0], None)):
            assert await successor.release(ended) == "success"
            if granted is not None:
                assert (await successor.expect("locked"))["id"] == granted
        assert await successor.release(waiting[1]) == "success"
        assert (await successor.expect("locked"))["id"] == waiting[2], "the request below the subtree waits behind it"
        assert await successor.release(waiting[2]) == "success"
        assert (await successor.expect("locked"))["id"] == waiting[3]
        for wire in (client, successor):
            await wire.close()


async def test_a_restarted_leader_does_not_wait_for_its_own_lease(redis: Redis) -> None:
    with running_server(redis, lease=600) as genie:
        client = await Wire.connect(genie.address)
        id_ = await client.lock("exclusive:a", transactionTimeout=600_000)
        genie.kill()
        genie.start()
        client = await Wire.connect(genie.address)
        assert await client.release(id_) == "success"
        await client.close()


async def test_a_leader_that_was_paused_beyond_its_lease_sends_nothing(redis: Redis) -> None:
    with leader_and_follower(redis, lease=2) as (leader, follower):
        client, other = await Wire.connect(leader.address), await Wire.connect(leader.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        leader.send(signal.SIGSTOP)
        follower.until("leadership acquired")
        client.send("request", resources=["exclusive:b"])
        other.send("ping")
        second = await Wire.connect(follower.address)
        assert await second.release(held) == "success"
        await second.lock("exclusive:a")
        leader.send(signal.SIGCONT)
        for wire in (client, other):
            with contextlib.suppress(ConnectionResetError):  # unread data resets the connection
                assert await wire.receive() == ("closed", {})
        leader.until("leadership lost")
        assert leader.until("leader changed")["leader"] == f"127.0.0.1:{follower.port}"
        late_client = await Wire.connect(leader.address)
        late_client.send("ping")
        assert (await late_client.expect("error"))["leader"] == f"127.0.0.1:{follower.port}"
        follower.send(signal.SIGTERM)
        leader.until("leadership acquired")
        late_client.send("ping")
        await late_client.expect("pong")
        for wire in (client, other, second, late_client):
            await wire.close()


async def test_a_leader_that_cannot_commit_steps_down_and_acquires_leadership_again(redis: Redis) -> None:
    with leader_and_follower(redis, lease=2, store_timeout_ms=100) as (leader, follower):
        client, _ = await connect_with_session(leader)
        id_ = await client.lock("exclusive:a", transactionTimeout=600_000)
        redis.send(signal.SIGSTOP)
        assert await client.receive() == ("closed", {})
        leader.until("leadership lost")
        rejected = await Wire.connect(leader.address)
        rejected.send("ping")
        message = await rejected.expect("error")
        assert message["code"] == "unavailable"
        assert "leader" not in message
        redis.send(signal.SIGCONT)
        leader.until("leadership acquired")
        next_client, resumed = await connect_with_session(leader)
        assert resumed
        assert (await next_client.expect("locked"))["id"] == id_
        follower_client = await Wire.connect(follower.address)
        follower_client.send("ping")
        assert (await follower_client.expect("error"))["leader"] == f"127.0.0.1:{leader.port}"
        for wire in (client, rejected, next_client, follower_client):
            await wire.close()


async def test_a_restarted_leader_waits_if_a_restarted_redis_may_have_lost_a_later_takeover(redis: Redis) -> None:
    with leader_and_follower(redis, lease=60) as (former, leader):
        redis.back_up()
        former.send(signal.SIGTERM)
        leader.until("leadership acquired")
        client = await Wire.connect(leader.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        leader.send(signal.SIGSTOP)
        redis.kill()
        redis.roll_back()
        redis.start()
        former.wait()
        former.start(wait=False)
        former.until("leader unknown")
        leader.send(signal.SIGCONT)
        assert former.until("listening")["role"] == "follower"
        assert await client.release(held) == "success"
        await client.close()


async def test_a_leader_that_stepped_down_restores_commits_that_redis_lost(redis: Redis) -> None:
    with running_server(redis) as genie:
        client, _ = await connect_with_session(genie)
        first = await client.lock("exclusive:first", transactionTimeout=600_000)
        redis.back_up()
        second = await client.lock("exclusive:second", transactionTimeout=600_000)
        assert await client.release(first) == "success"
        redis.kill()
        genie.until("leadership lost")
        redis.roll_back()
        redis.start()
        assert genie.until("leadership acquired")["held_locks"] == 1
        next_client, resumed = await connect_with_session(genie)
        assert resumed
        assert (await next_client.expect("locked"))["id"] == second
        assert set(stored_records(redis)) == {second}


async def test_a_leader_restores_an_emptied_redis_before_a_follower_takes_over(redis: Redis) -> None:
    with running_server(redis, lease=60) as leader:
        redis.call("FLUSHALL")
        follower = Genie(redis, lease=60)
        try:
            follower.start()
            assert follower.log[-1]["role"] == "follower", "the leader is alive, and has restored the namespace"
        finally:
            follower.kill()
        client = await Wire.connect(leader.address)
        await client.lock("exclusive:a")
        await client.close()


def follower_waits_for_log(redis: Redis) -> bool:
    return int(redis.call("INFO", "clients")["blocked_clients"]) > 0


async def test_a_follower_restores_what_redis_and_its_leader_lost(redis: Redis) -> None:
    with running_server(redis, lease=60) as leader, running_server(redis, lease=2) as follower:
        follower.until("replica loaded")
        client = await Wire.connect(leader.address)
        id_ = await client.lock("exclusive:a", transactionTimeout=600_000)
        await until(lambda: follower_waits_for_log(redis))  # then it has read the whole log
        leader.kill()
        redis.call("FLUSHALL")
        assert follower.until("leadership acquired")["held_locks"] == 1
        next_client = await Wire.connect(follower.address)
        assert await next_client.release(id_) == "success"
        for wire in (client, next_client):
            await wire.close()


async def test_a_follower_loads_the_snapshot_if_the_log_is_truncated(redis: Redis) -> None:
    with leader_and_follower(redis) as (leader, follower):
        client = await Wire.connect(leader.address)
        first = await client.lock("exclusive:first", transactionTimeout=600_000)
        follower.send(signal.SIGSTOP)
        ids = [await client.lock(f"exclusive:{number}", transactionTimeout=600_000) for number in range(20)]
        for id_ in ids[::2]:
            await client.release(id_)
        await checkpoint_written(redis)
        assert int(redis.call("XTRIM", "{genie}:log", "MAXLEN", "5")) > 0
        follower.send(signal.SIGCONT)
        follower.until("replication log truncated")
        last = await client.lock("exclusive:last", transactionTimeout=600_000)
        leader.send(signal.SIGTERM)
        assert follower.until("leadership acquired")["held_locks"] == 12
        next_client = await Wire.connect(follower.address)
        for id_ in [first, *ids[1::2], last]:
            assert await next_client.release(id_) == "success"
        for wire in (client, next_client):
            await wire.close()
