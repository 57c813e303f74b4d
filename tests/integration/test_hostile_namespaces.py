"""Names of namespaces are checked wherever they enter: none reaches a key of Redis, a path, a label or a URL unchecked."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest

from genie.admin import AdminServer
from genie.client.config import resolve_namespace
from genie.config import Settings
from genie.history.writer import namespace_directory
from genie.server.app import Server
from genie.storage.redis.keyspace import NAME
from support.admin.client import fetch
from support.network.wire import Wire
from support.processes.commands import genie_cli

HOSTILE = (
    "",
    "a}:log",
    "{a",
    "a*",
    "a?",
    "[a]",
    "a\n",
    "\n",
    "a\tb",
    "../a",
    "a/../../b",
    "/etc",
    "a\\b",
    "a b",
    "a,b\u202e",
    "\u0430dmin",
    "\uff41",
    "a" * 129,
    "a\x1b[2J",
    'a"} 1\nb{c="',
    "%2e%2e",
    "$(id)",
)
WITH_NUL = (*HOSTILE, "a\0")


@pytest.fixture
async def ports() -> AsyncIterator[tuple[int, int]]:
    """The lock port and the admin port of a server in this process."""
    server = Server(Settings.from_options(port=0, admin_port=0, slow_wait=0))
    admin = AdminServer(server)
    _, port = await server.start()
    await admin.start()
    assert admin.address is not None
    try:
        yield port, admin.address[1]
    finally:
        await admin.stop()
        await server.stop()


async def test_the_protocol_rejects_it_in_every_command(ports: tuple[int, int]) -> None:
    for name in WITH_NUL:
        wire = await Wire.connect(("127.0.0.1", ports[0]))
        for command, fields in (
            ("request", {"resources": ["exclusive:a"]}),
            ("release", {"id": 1}),
            ("extend", {"id": 1, "transactionTimeout": 1_000}),
            ("hello", {}),
        ):
            wire.send(command, namespace=name, **fields)
            assert (await wire.expect("error"))["code"] == "bad-request", (command, name)


async def test_the_admin_port_rejects_it_and_no_label_has_it(ports: tuple[int, int]) -> None:
    for name in WITH_NUL:
        for path in ("/api/state", "/leaderz", "/api/history/a"):
            response = await fetch(ports[1], f"{path}?namespace={quote(name, safe='')}")
            assert response.status == 400, (path, name)
    for name in ("a}:log", "../a", "\u0430dmin"):
        assert (await fetch(ports[1], f"/api/{quote(name, safe='')}/state")).status == 404
    metrics = (await fetch(ports[1], "/metrics")).body.decode()
    assert set(re.findall('namespace="([^"]*)"', metrics)) == {"genie"}


@pytest.mark.parametrize("name", [name for name in HOSTILE if name])
def test_the_commands_reject_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "history"
    folder.mkdir()
    for command in (
        ("inspect",),
        ("top", "--once"),
        ("history", "--history-dir", str(folder)),
        ("replay", "--history-dir", str(folder)),
        ("store", "check", "--redis-url", "redis://127.0.0.1:1"),
    ):
        result = genie_cli(*command, "--namespace", name)
        assert result.returncode == 2, (command, result)
        assert "letters, digits" in result.stderr
    if "," not in name:
        result = genie_cli("serve", "--namespaces", f"a,{name}", "--port", "0")
        assert result.returncode == 2, result
    assert [*tmp_path.iterdir()] == [folder]
    assert not [*folder.iterdir()]


def test_the_client_and_the_store_reject_it() -> None:
    for name in WITH_NUL:
        assert NAME.fullmatch(name) is None
        with pytest.raises(ValueError, match="letters, digits"):
            resolve_namespace(name)


@pytest.mark.parametrize("name", [".", "..", "...", "a:b", ".a", "-", "--help", "a..b", "redaction.key"])
def test_a_valid_name_is_one_folder_in_the_history(name: str, tmp_path: Path) -> None:
    assert NAME.fullmatch(name)
    directory = namespace_directory(tmp_path, name)
    assert directory.resolve().parent == tmp_path.resolve()
    assert directory.name not in (".", "..")


async def test_clients_cannot_add_series_to_the_metrics(ports: tuple[int, int]) -> None:
    def series(body: bytes) -> set[str]:
        return {line.rpartition(" ")[0] for line in body.decode().splitlines() if not line.startswith("#")}

    wire = await Wire.connect(("127.0.0.1", ports[0]))
    wire.send("inspect", resource="a")
    await wire.receive()
    before = series((await fetch(ports[1], "/metrics")).body)
    for number in range(1_000):
        name = f'x{number}"}} 1 \u202e\\'
        wire.send("request", resources=[f"exclusive:{name}"], transactionName=name, note=name, ref=f"r{number}")
        wire.send(name, id=number)
        wire.send("hello", namespace=name, client=name, token=name)
        wire.send("release", id=-number, ref=name)
        for _ in range(5):
            await wire.receive()
        if number % 100 == 0:
            await fetch(ports[1], f"/{quote(name)}")
            await fetch(ports[1], f"/api/state?namespace={quote(name)}")
            await fetch(ports[1], f"/metrics?{quote(name)}")
    after = series((await fetch(ports[1], "/metrics?again")).body)
    added = after - before
    assert not [each for each in added if "x1" in each or "\u202e" in each]
    assert len(added) <= 5, added
