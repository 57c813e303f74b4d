"""Checks of deploy/compose-ha.yml that need no container engine.

Its services are run as processes with the command lines and the environment of the file. Each has a loopback address
instead of its name.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from redis.asyncio import Redis as Client
from redis.exceptions import AuthenticationError

from genie import connect
from genie.config import Settings
from genie.storage.redis.url import RedisUrl
from redises.group import until
from support.processes.ports import free_port
from support.processes.servers import WAIT_S

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-tests"  # noqa: S105 - only used here
PASSWORD = "a-password-of-the-tests"  # noqa: S105 - only used here
REDISES = [f"redis-{number}" for number in (1, 2, 3)]
SENTINELS = [f"sentinel-{number}" for number in (1, 2, 3)]
NODES = ["genie-1", "genie-2"]


def compose() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "deploy/compose-ha.yml").read_text())
    assert isinstance(found, dict)
    return found


def image_environment() -> dict[str, str]:
    """Return the environment of the image."""
    return dict(re.findall(r"(GENIE_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))


def services(names: list[str]) -> list[dict[str, Any]]:
    return [compose()["services"][name] for name in names]


def test_no_service_is_a_single_point_of_failure() -> None:
    found = compose()["services"]
    assert found.keys() == {*REDISES, *SENTINELS, *NODES, "token"}
    masters = [name for name in REDISES if "FOLLOWS" not in found[name]["environment"]]
    assert [found[name]["environment"].get("FOLLOWS") for name in REDISES] == [None, masters[0], masters[0]]
    for name in [*REDISES, *SENTINELS]:
        assert found[name]["environment"]["NAME"] == name, "the announced name is the one in the network"
        assert found[name]["volumes"] == [f"{name}:/data", "token:/run/genie:ro"]
        assert found[name]["group_add"] == found["token"]["user"].split(":")[1:], "may read the password"
        assert name in compose()["volumes"]
        assert "ports" not in found[name], "Redis is not published"
    script = found["sentinel-1"]["command"][-1]
    assert f"sentinel monitor locks {masters[0]} 6379 {len(SENTINELS) // 2 + 1}'" in script
    for service in services(REDISES):
        assert "'appendonly yes'" in service["command"][-1]
        assert "'maxmemory-policy noeviction'" in service["command"][-1]


def test_services_restart_and_have_no_privileges() -> None:
    for service in services([*REDISES, *SENTINELS, *NODES]):
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0].startswith("CMD")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_environment_of_the_servers() -> None:
    ports = [image_environment()[name] for name in ("GENIE_PORT", "GENIE_ADMIN_PORT")]
    for number, service in enumerate(services(NODES), 1):
        environment = service["environment"]
        url = RedisUrl.parse(environment["GENIE_REDIS_URL"])
        assert [node.host for node in url.nodes] == SENTINELS
        assert url.master == "locks"
        assert int(environment["GENIE_REDIS_MIN_REPLICAS"]) <= len(REDISES) - 2, "one replica may be down"
        published = service["ports"]
        assert [port.split(":")[2] for port in published] == ports
        assert all(port.startswith("127.0.0.1:") for port in published), "connections are not encrypted"
        client = ":".join(published[0].split(":")[:2])
        assert environment["GENIE_ADVERTISE"] == f"${{GENIE_ADVERTISE_{number}:-{client}}}"
        for name in environment:
            assert name.removeprefix("GENIE_").lower() in Settings().options(), name
        assert set(service["depends_on"]) == {*SENTINELS, "token"}
    one, two = (service["ports"] for service in services(NODES))
    assert not {*one} & {*two}


def test_the_token_service_is_that_of_the_other_file() -> None:
    other = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["token"]
    assert compose()["services"]["token"] == other | {"build": ".."}


class Deployment:
    """The services as processes. Each has an address of its own and the ports of the file.

    The ports of Genie are other, free ones: a Genie of this machine may listen on all addresses.
    """

    def __init__(self, folder: Path) -> None:
        network = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"  # noqa: S311 - no secret
        self.addresses = {name: f"{network}.{number}" for number, name in enumerate([*REDISES, *SENTINELS, *NODES], 1)}
        self.port, self.admin_port = free_port(), free_port()
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "token").write_text(TOKEN)
        self.change_password(PASSWORD)

    def change_password(self, password: str) -> None:
        """Write the password of Redis, which the services read when they start."""
        self.password = password
        (self._folder / "redis-password").write_text(password)

    def here(self, text: str) -> str:
        """Replace the names of services by their addresses, the volume of the secrets by the folder, and `$$` by `$`."""
        for name, address in self.addresses.items():
            text = text.replace(name, address)
        return text.replace("/run/genie", str(self._folder)).replace("$$", "$")

    def start(self, name: str) -> None:
        service, folder = compose()["services"][name], self._folder / name
        folder.mkdir(exist_ok=True)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GENIE_")}
        given = {key: self.here(value) for key, value in service["environment"].items()}
        variables = {key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for key, value in given.items()}  # the defaults
        if name in NODES:
            own = {"GENIE_HOST": self.addresses[name], "GENIE_ADMIN_HOST": self.addresses[name]}
            token = {"GENIE_TOKEN_FILE": str(self._folder / "token")}
            ports = {"GENIE_PORT": str(self.port), "GENIE_ADMIN_PORT": str(self.admin_port)}
            variables |= own | token | ports | {"GENIE_ADVERTISE": f"{self.addresses[name]}:{self.port}"}
            environment = clean | image_environment() | variables
            shell, option, script = service["entrypoint"]
            script = self.here(script).replace("genie serve", f"{sys.executable} -m genie.cli serve")
        else:
            environment = clean | variables
            shell, option, script = service["command"]
            script = self.here(script).rstrip() + f" --bind {self.addresses[name]}"
        assert (shell, option) == ("sh", "-c")
        command = [str(shutil.which(shell)), option, script]
        with (folder / "log").open("ab") as log:
            self._running[name] = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def healthy(self, name: str) -> bool:
        """Return whether the health check of a Redis succeeds."""
        kind, check = compose()["services"][name]["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        command = self.here(check).replace("redis-cli", f"redis-cli -h {self.addresses[name]}")
        return not subprocess.run(command, shell=True, capture_output=True, check=False).returncode  # noqa: S602 - our own

    async def call(self, name: str, *parts: object) -> Any:
        """Send a command to a Redis or a Sentinel."""
        port = 26379 if name in SENTINELS else 6379
        async with Client(
            host=self.addresses[name],
            port=port,
            password=self.password,
            decode_responses=True,
            protocol=2,
            socket_timeout=WAIT_S,
        ) as client:
            return await client.execute_command(*parts)

    async def master(self) -> str | None:
        """Return the name of the master on which all sentinels agree; None if they do not."""
        replies = [await self.call(name, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "locks") for name in SENTINELS]
        address, *others = {host for host, _ in replies}
        return None if others else next(name for name, own in self.addresses.items() if own == address)

    async def is_complete(self) -> bool:
        """Return whether the master has its replicas, and the sentinels know them and each other."""
        master = await self.master()
        if master is None:
            return False
        info = await self.call(master, "INFO", "replication")
        quorums = [await self.call(name, "SENTINEL", "CKQUORUM", "locks") for name in SENTINELS]
        rows = [await self.call(name, "SENTINEL", "REPLICAS", "locks") for name in SENTINELS]
        return (
            info["connected_slaves"] == len(REDISES) - 1
            and all(f"OK {len(SENTINELS)} usable" in text for text in quorums)
            and all(len(replicas) == len(REDISES) - 1 for replicas in rows)
        )

    async def has_new_master(self, old: str) -> bool:
        """Return whether the sentinels have promoted another master."""
        new = await self.master()
        return new not in (None, old) and (await self.call(new, "ROLE"))[0] == "master"


@contextmanager
def deploy(folder: Path) -> Iterator[Deployment]:
    deployment = Deployment(folder)
    try:
        yield deployment
    finally:
        deployment.kill_all()


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has one address")
async def test_clients_survive_the_death_of_the_master_and_of_the_leader(tmp_path: Path) -> None:
    with deploy(tmp_path) as deployment:
        await start_redises(deployment)
        assert (await deployment.call("redis-1", "INFO", "replication"))["connected_slaves"] == 2
        for name in [*SENTINELS, *NODES]:
            deployment.start(name)
        await until("the sentinels know all servers", deployment.is_complete)
        for name, port in (*((name, 6379) for name in REDISES), *((name, 26379) for name in SENTINELS)):
            async with Client(host=deployment.addresses[name], port=port) as anonymous:
                with pytest.raises(AuthenticationError):
                    await anonymous.execute_command("INFO")
        await until("a server leads", lambda: leaders(deployment))
        addresses = [f"{deployment.addresses[name]}:{deployment.port}" for name in NODES]
        async with connect(
            addresses, token=TOKEN, connect_timeout=WAIT_S, response_timeout=WAIT_S, session_timeout=60
        ) as client:
            lock = await client.acquire("x", transaction_timeout=600)
            old = await first_result("the sentinels agree", deployment.master)
            deployment.kill(old)
            await until("another is the master", lambda: deployment.has_new_master(old))
            assert (await client.inspect(resource="x")).holders[0].id == lock.id
            second = await client.acquire("y", transaction_timeout=600)
            (leader,) = await first_result("a server leads", lambda: leaders(deployment))
            deployment.kill(leader)
            for held in (lock, second):
                assert not held.lost.is_set()
                await held.release()


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has one address")
async def test_a_changed_password_is_used_after_a_restart(tmp_path: Path) -> None:
    with deploy(tmp_path) as deployment:
        for password in (PASSWORD, f"new-{PASSWORD}"):
            deployment.change_password(password)
            await start_redises(deployment)
            for name in SENTINELS:
                deployment.start(name)
            await until("the sentinels know all servers", deployment.is_complete)
            deployment.kill_all()


async def start_redises(deployment: Deployment) -> None:
    """Start the Redis servers, and wait until they are healthy."""
    for name in REDISES:
        deployment.start(name)

    async def healthy() -> bool:
        return all(deployment.healthy(name) for name in REDISES)

    await until("all Redis servers are healthy", healthy)


async def first_result(what: str, query: Callable[[], Awaitable[T | None]]) -> T:
    """Wait until a query returns something; return it."""
    results: list[T] = []

    async def has_result() -> bool:
        results.extend(filter(None, [await query()]))
        return bool(results)

    await until(what, has_result)
    return results[0]


async def leaders(deployment: Deployment) -> list[str]:
    """Return the servers that are leaders by their own health check."""
    return [name for name in NODES if await is_leader(deployment.addresses[name], deployment.admin_port)]


async def is_leader(address: str, port: int) -> bool:
    """Return whether the admin port reports a leader."""
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(f"GET /leaderz HTTP/1.1\r\nHost: {address}:{port}\r\nConnection: close\r\n\r\n".encode())
    status = await reader.readline()
    await reader.read()
    writer.close()
    await writer.wait_closed()
    return status.split()[1] == b"200"
