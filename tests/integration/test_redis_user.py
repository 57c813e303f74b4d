"""The Redis user that docs/how-to/deploying.md describes has every permission that a server needs."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from pathlib import Path

from redises.cluster import Member, running_cluster
from support.network.certificates import Certificates
from support.network.wire import Wire
from support.processes.servers import WAIT_S, Genie, Redis

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "deploying.md"


def documented_user(namespace: str) -> list[str]:
    """Return the command of the page that creates the user, with another namespace."""
    page = PAGE.read_text()
    command = page[page.index("redis-cli ACL SETUSER") :].partition("```")[0]
    arguments = shlex.split(command.replace("\\\n", ""))[1:]
    assert {"~{orders}:*", "~{wallets}:*", ">PASSWORD"} <= {*arguments}
    arguments.remove("~{wallets}:*")
    return [{"~{orders}:*": f"~{{{namespace}}}:*", ">PASSWORD": ">secret"}.get(part, part) for part in arguments]


def commands_for(purpose: str) -> list[str]:
    """Return the rules for the further commands that the page names for a purpose."""
    (commands,) = re.findall(rf"^\| (.*) \| {purpose} \|$", PAGE.read_text(), re.MULTILINE)
    return [f"+{command.lower().replace(' ', '|')}" for command in re.findall(r"`([A-Z -]+)`", commands)]


async def checkpoint_after(redis: Redis, position: bytes) -> bytes:
    """Wait for a checkpoint at another position than `position`, and return its position."""
    async with asyncio.timeout(WAIT_S):
        while True:
            stored = redis.call("HGET", "{genie}:meta", "checkpoint").partition(b" ")[0]
            if stored != position:
                return bytes(stored)
            await asyncio.sleep(0.05)


async def test_the_documented_redis_user_is_sufficient(redis: Redis) -> None:
    redis.call(*documented_user("genie"))
    redis.create_namespace()
    server, other = Genie(redis), Genie(redis)
    server.redis_url = other.redis_url = redis.url.replace("redis://", "redis://genie:secret@")
    try:
        server.start()
        client = await Wire.connect(server.address)
        # Many resources, because a checkpoint is due only after more bytes than heartbeats have.
        lock = await client.lock(*(f"exclusive:a/{number}" for number in range(200)), transactionTimeout=600_000)
        position = await checkpoint_after(redis, b"1-0")
        assert await client.release(lock) == "success"
        await client.lock(
            "exclusive:b", *(f"exclusive:a/{number}" for number in range(200)), transactionTimeout=600_000
        )
        await checkpoint_after(redis, position)
        other.start()  # a follower loads the state
        redis.call("FLUSHALL")  # the leader restores its snapshot
        server.until("snapshot restored")
        server.send(signal.SIGTERM)  # the leader resigns, and the follower takes over
        server.wait()
        other.until("leadership acquired")
        client = await Wire.connect(other.address)
        await client.request("exclusive:b", queueTimeout=0)
        assert (await client.expect("released"))["reason"] == "queue-timeout"
        redis.call("CONFIG", "SET", "maxmemory", "1")
        other.until("store out of memory")
        redis.call("CONFIG", "SET", "maxmemory", "0")
        other.until("store memory available again")
        assert redis.call("ACL", "LOG") == []
    finally:
        server.kill()
        other.kill()


async def test_the_documented_redis_user_is_sufficient_in_a_cluster() -> None:
    """A slot migration, a failover to a replica, and a takeover after the leader was killed."""
    further = commands_for("only in a Redis Cluster")
    assert further == ["+cluster|slots", "+asking"]
    async with running_cluster() as redis:
        for node in redis.members:
            node.call(*documented_user("genie"), *further)
        redis.create_namespace()
        server, other = Genie(redis, lease=1), Genie(redis, lease=1)
        server.redis_url = other.redis_url = redis.url.replace("://", "://genie:secret@")
        try:
            server.start()
            client = await Wire.connect(server.address)
            await client.lock("exclusive:a", transactionTimeout=600_000)
            other.start()
            old = await redis.owner()
            await redis.move("genie", next(node for node in await redis.masters() if node is not old))
            await client.lock("exclusive:b", transactionTimeout=600_000)
            await redis.failover()
            await client.lock("exclusive:c", transactionTimeout=600_000)
            server.kill()
            other.until("leadership acquired")
            client = await Wire.connect(other.address)
            for name in ("a", "b", "c"):
                await client.request(f"exclusive:{name}", queueTimeout=0)
                assert (await client.expect("released"))["reason"] == "queue-timeout"
            assert [node.call("ACL", "LOG") for node in redis.members] == [[]] * len(redis.members)
        finally:
            server.kill()
            other.kill()


async def test_tls_to_a_cluster(tmp_path: Path) -> None:
    """The primaries, and a redirection, are found with the ports for TLS, which `tls-cluster yes` makes the nodes report."""
    certificates = Certificates(tmp_path)
    async with running_cluster(replicas=False, certificates=certificates) as redis:
        redis.create_namespace()
        genie = Genie(redis, lease=1)
        hosts = ",".join(f"localhost:{node.tls_port}" for node in redis.members)
        genie.redis_url = f"rediss+cluster://{hosts}?ssl_ca_certs={certificates.ca}"
        try:
            genie.start()
            client = await Wire.connect(genie.address)
            await client.lock("exclusive:a")
            old = await redis.owner()
            new = next(node for node in redis.members if node is not old)

            async def moved() -> None:  # the owner replies with ASK
                await client.lock("exclusive:b")

            await redis.move("genie", new, moved=moved)
            await client.lock("exclusive:c")
            assert await used_ports(old) <= {old.tls_port}
            assert await used_ports(new) == {new.tls_port}
        finally:
            genie.kill()


async def used_ports(node: Member) -> set[int]:
    """Return the ports of a node to which clients other than this test are connected."""
    clients = str(await node.ask("CLIENT", "LIST", "TYPE", "NORMAL")).splitlines()
    return {int(re.sub(r".* laddr=\S+:(\d+) .*", r"\1", line)) for line in clients if "cmd=client" not in line}
