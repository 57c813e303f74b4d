"""What can be said of deploy/compose-ha.yml where there is no container engine.

Its services are run as it says, each at an address of the loopback in place of its name: the command lines and the
environment are those of the file.
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

from genie import connect
from genie.config import Settings
from genie.storage.redis.url import RedisUrl
from ports import free_port
from redises.group import until
from servers import WAIT_S

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-tests"  # noqa: S105 - it opens nothing
REDISES = [f"redis-{number}" for number in (1, 2, 3)]
SENTINELS = [f"sentinel-{number}" for number in (1, 2, 3)]
NODES = ["genie-1", "genie-2"]


def compose() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "deploy/compose-ha.yml").read_text())
    assert isinstance(found, dict)
    return found


def image_environment() -> dict[str, str]:
    """What the image tells Genie."""
    return dict(re.findall(r"(GENIE_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))


def services(names: list[str]) -> list[dict[str, Any]]:
    return [compose()["services"][name] for name in names]


def test_there_is_nothing_without_another_of_its_kind() -> None:
    found = compose()["services"]
    assert found.keys() == {*REDISES, *SENTINELS, *NODES, "token"}
    masters = [name for name in REDISES if "FOLLOWS" not in found[name]["environment"]]
    assert [found[name]["environment"].get("FOLLOWS") for name in REDISES] == [None, masters[0], masters[0]]
    for name in [*REDISES, *SENTINELS]:
        assert found[name]["environment"]["NAME"] == name, "others know it by the name that it has in the network"
        assert found[name]["volumes"] == [f"{name}:/data"]
        assert name in compose()["volumes"]
        assert "ports" not in found[name], "what Redis has is for its network alone"
    script = found["sentinel-1"]["command"][-1]
    assert f"sentinel monitor locks {masters[0]} 6379 {len(SENTINELS) // 2 + 1}'" in script
    for service in services(REDISES):
        assert "'appendonly yes'" in service["command"][-1]
        assert "'maxmemory-policy noeviction'" in service["command"][-1]


def test_all_of_them_start_again_and_may_do_nothing_else() -> None:
    for service in services([*REDISES, *SENTINELS, *NODES]):
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0].startswith("CMD")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_what_the_servers_are_told() -> None:
    ports = [image_environment()[name] for name in ("GENIE_PORT", "GENIE_ADMIN_PORT")]
    for number, service in enumerate(services(NODES), 1):
        environment = service["environment"]
        url = RedisUrl.parse(environment["GENIE_REDIS_URL"])
        assert [node.host for node in url.nodes] == SENTINELS
        assert url.master == "locks"
        assert int(environment["GENIE_REDIS_MIN_REPLICAS"]) <= len(REDISES) - 2, "one may be away, and all goes on"
        published = service["ports"]
        assert [port.split(":")[2] for port in published] == ports
        assert all(port.startswith("127.0.0.1:") for port in published), "tokens go over plain connections"
        client = ":".join(published[0].split(":")[:2])
        assert environment["GENIE_ADVERTISE"] == f"${{GENIE_ADVERTISE_{number}:-{client}}}"
        for name in environment:
            assert name.removeprefix("GENIE_").lower() in Settings().options(), name
        assert set(service["depends_on"]) == {*SENTINELS, "token"}
    one, two = (service["ports"] for service in services(NODES))
    assert not {*one} & {*two}


def test_the_token_is_made_as_in_the_other_file() -> None:
    other = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["token"]
    assert compose()["services"]["token"] == other | {"build": ".."}


class Stage:
    """The services as processes. Each has an address of its own, and the ports that the file says; but those of Genie are
    free ones, as a Genie that really runs may listen at every address.
    """

    def __init__(self, folder: Path) -> None:
        network = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"  # noqa: S311 - no secret
        self.addresses = {name: f"{network}.{place}" for place, name in enumerate([*REDISES, *SENTINELS, *NODES], 1)}
        self.port, self.admin_port = free_port(), free_port()
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "token").write_text(TOKEN)

    def at(self, text: str) -> str:
        """With addresses in place of names."""
        for name, address in self.addresses.items():
            text = text.replace(name, address)
        return text

    def start(self, name: str) -> None:
        service, folder = compose()["services"][name], self._folder / name
        folder.mkdir(exist_ok=True)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GENIE_")}
        said = {key: self.at(value) for key, value in service["environment"].items()}
        if name in NODES:
            own = {"GENIE_HOST": self.addresses[name], "GENIE_ADMIN_HOST": self.addresses[name]}
            given = {"GENIE_NAMESPACES": "genie", "GENIE_TOKEN_FILE": str(self._folder / "token")}
            ports = {"GENIE_PORT": str(self.port), "GENIE_ADMIN_PORT": str(self.admin_port)}
            said |= own | given | ports | {"GENIE_ADVERTISE": f"{self.addresses[name]}:{self.port}"}
            environment = clean | image_environment() | said
            command = [sys.executable, "-m", "genie.cli", "serve"]
        else:
            environment = clean | said
            shell, option, script = service["command"]
            assert (shell, option) == ("sh", "-c")
            bound = self.at(script).replace("$$", "$").rstrip() + f" --bind {self.addresses[name]}"
            command = [str(shutil.which(shell)), option, bound]
        with (folder / "log").open("ab") as log:
            self._running[name] = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def healthy(self, name: str) -> bool:
        """What the check of a Redis says."""
        kind, check = compose()["services"][name]["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        there = check.replace("redis-cli", f"redis-cli -h {self.addresses[name]}")
        return not subprocess.run(there, shell=True, capture_output=True, check=False).returncode  # noqa: S602 - our own

    async def ask(self, name: str, *parts: object) -> Any:
        """A Redis or a sentinel."""
        port = 26379 if name in SENTINELS else 6379
        async with Client(
            host=self.addresses[name], port=port, decode_responses=True, protocol=2, socket_timeout=WAIT_S
        ) as client:
            return await client.execute_command(*parts)

    async def master(self) -> str | None:
        """The name of the one that all sentinels name; None while they do not agree."""
        said = [await self.ask(name, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "locks") for name in SENTINELS]
        address, *others = {host for host, _ in said}
        return None if others else next(name for name, own in self.addresses.items() if own == address)

    async def settled(self) -> bool:
        """The master has its replicas, and the sentinels know them and each other."""
        master = await self.master()
        if master is None:
            return False
        info = await self.ask(master, "INFO", "replication")
        whole = [await self.ask(name, "SENTINEL", "CKQUORUM", "locks") for name in SENTINELS]
        rows = [await self.ask(name, "SENTINEL", "REPLICAS", "locks") for name in SENTINELS]
        return (
            info["connected_slaves"] == len(REDISES) - 1
            and all(f"OK {len(SENTINELS)} usable" in text for text in whole)
            and all(len(found) == len(REDISES) - 1 for found in rows)
        )

    async def replaced(self, old: str) -> bool:
        """Whether there is another master by now."""
        new = await self.master()
        return new not in (None, old) and (await self.ask(new, "ROLE"))[0] == "master"


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    made = Stage(folder)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has one address")
async def test_a_master_and_a_leader_die_and_clients_go_on(tmp_path: Path) -> None:
    with stage(tmp_path) as made:
        for name in REDISES:
            made.start(name)

        async def healthy() -> bool:
            return all(made.healthy(name) for name in REDISES)

        await until("all Redis servers are healthy", healthy)
        assert (await made.ask("redis-1", "INFO", "replication"))["connected_slaves"] == 2
        for name in [*SENTINELS, *NODES]:
            made.start(name)
        await until("the sentinels know all", made.settled)
        await until("a server leads", lambda: leading(made))
        to = [f"{made.addresses[name]}:{made.port}" for name in NODES]
        async with connect(to, token=TOKEN, connect_timeout=WAIT_S, session_timeout=60) as client:
            lock = await client.acquire("x", transaction_timeout=600)
            old = await first("the sentinels agree", made.master)
            made.kill(old)
            await until("another is the master", lambda: made.replaced(old))
            assert (await client.inspect(resource="x")).holders[0].id == lock.id
            again = await client.acquire("y", transaction_timeout=600)
            (leader,) = await first("a server leads", lambda: leading(made))
            made.kill(leader)
            for held in (lock, again):
                assert not held.lost.is_set()
                await held.release()


async def first(what: str, look: Callable[[], Awaitable[T | None]]) -> T:
    """Wait until there is something to be seen; returns it."""
    seen: list[T] = []

    async def something() -> bool:
        seen.extend(filter(None, [await look()]))
        return bool(seen)

    await until(what, something)
    return seen[0]


async def leading(made: Stage) -> list[str]:
    """The servers that say so."""
    return [name for name in NODES if await leads(made.addresses[name], made.admin_port)]


async def leads(address: str, port: int) -> bool:
    """What the admin port says."""
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(f"GET /leaderz HTTP/1.1\r\nHost: {address}:{port}\r\nConnection: close\r\n\r\n".encode())
    status = await reader.readline()
    await reader.read()
    writer.close()
    await writer.wait_closed()
    return status.split()[1] == b"200"
