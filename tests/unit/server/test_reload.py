"""A reload of the token file: in parts, and at once for all commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from genie import access
from genie.access import AccessControl
from genie.config import Limits, Settings
from genie.observability.stats import Stats
from genie.roles import Starting
from genie.server import app
from genie.server.app import Server
from genie.server.auth import Authenticator
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from support.network.recording_transport import RecordingTransport
from work.opcodes import OpcodeCounter

PRINCIPALS = 500
PART = 20


def token(name: str) -> str:
    return f"token-of-the-principal-{name}"


def sections(*names: str, prefix: str = "own/") -> str:
    return "".join(f'[{name}]\ntoken = "{token(name)}"\nprefixes = ["{prefix}"]\n' for name in names)


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until a condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


class World:
    """A server that leads, and clients without sockets."""

    def __init__(self, tmp_path: Path, names: list[str]) -> None:
        self.file = tmp_path / "tokens"
        self.write(sections(*names))
        self.server = Server(Settings.from_options(port=0, token_file=str(self.file)))

    def write(self, text: str) -> None:
        self.file.write_text(text)
        self.file.chmod(0o600)

    async def reload(self) -> int:
        """Reload, and return the number of iterations of the event loop."""
        self.server._on_sighup()
        iterations = 0
        assert self.server._reloading is not None
        while not self.server._reloading.done():
            await asyncio.sleep(0)
            iterations += 1
        self.server._reloading.result()
        return iterations


class Client:
    def __init__(self, world: World, name: str) -> None:
        self.received: list[dict[str, Any]] = []
        self.connection: Connection = world.server._make_connection()
        self.connection.connection_made(
            RecordingTransport(lambda data: self.received.extend(map(json.loads, data.splitlines())))
        )
        self.send("hello", token=token(name))

    def send(self, command: str, **payload: Any) -> None:
        self.connection.data_received(json.dumps({"command": command, "payload": payload}).encode() + b"\n")

    async def ask(self, command: str, **payload: Any) -> str:
        """Send a command, and return the command of the reply."""
        before = len(self.received)
        self.send(command, **payload)
        await until(lambda: len(self.received) > before)
        return str(self.received[-1]["command"])


NAMES = [f"p{number}" for number in range(PRINCIPALS)]


@pytest.fixture(name="world")
async def _world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(access, "SECTIONS_PER_PART", PART)
    monkeypatch.setattr(app, "MAX_CHECKED_CONNECTIONS", PART)
    world = World(tmp_path, NAMES)
    await world.server.start()
    yield world
    for connection in list(world.server.connections):
        connection.connection_lost(None)
    await world.server.stop()


async def test_the_file_is_read_in_parts_and_used_at_once(world: World) -> None:
    clients = [Client(world, name) for name in NAMES[:100]]
    assert [await client.ask("watch", prefix="own/") for client in clients] == ["watching"] * len(clients)
    world.write(sections(*NAMES[50:]))
    world.server._on_sighup()
    revoked = closed = iterations = 0
    reloading = world.server._reloading
    assert reloading is not None
    while not reloading.done():
        before = closed
        await asyncio.sleep(0)
        iterations += 1
        revoked = sum(not client.connection.principal.permissions for client in clients if client.connection.principal)
        closed = sum(client.connection.closing for client in clients)
        assert revoked in (0, 50), "for all commands at once"
        assert closed - before <= PART
        assert closed <= revoked
    assert iterations >= 3 * (PRINCIPALS - 50) // PART + len(clients) // PART - 1
    assert closed == 50
    assert await clients[-1].ask("ping") == "pong"
    assert await Client(world, NAMES[-1]).ask("ping") == "pong"


async def test_a_command_that_waits_is_rejected_after_its_principal_was_removed(world: World) -> None:
    client = Client(world, NAMES[0])
    await client.ask("ping")
    world.write(sections(*NAMES[1:]))
    world.server._on_sighup()
    while client.connection.principal is None or client.connection.principal.permissions:
        client.send("ping")
        await asyncio.sleep(0)
    client.send("request", resources=["exclusive:own/1"])
    await world.reload()
    await until(lambda: client.received[-1]["payload"].get("code") == "unauthorized")
    assert "locked" not in [message["command"] for message in client.received]


async def test_a_reload_during_a_reload_follows_it(world: World) -> None:
    world.write(sections(*NAMES, "first"))
    world.server._on_sighup()
    for _ in range(5):
        await asyncio.sleep(0)
    world.write(sections(*NAMES, "second"))
    world.server._on_sighup()
    world.server._on_sighup()
    await world.reload()
    assert world.server.access.by_token(token("first")) is None
    assert world.server.access.by_token(token("second")) is not None


async def test_a_connection_that_is_lost_during_the_reload_is_not_closed_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[Connection](), Connection.close_revoked
    monkeypatch.setattr(Connection, "close_revoked", lambda self: (closed.append(self), close(self)))
    clients = [Client(world, NAMES[number < PART]) for number in range(3 * PART)]
    await clients[-1].ask("ping")
    world.write(sections(*NAMES[1:]))
    world.server._on_sighup()
    lost = clients[PART].connection  # of the second part
    await until(lambda: lost.principal is not None and not lost.principal.permissions)
    assert not lost.closing
    lost.connection_lost(None)  # the second part precedes the handler's batch
    await world.reload()
    assert lost not in closed, "it has submitted the end of its input before"
    assert len(closed) == 2 * PART - 1


class WithCertificate(RecordingTransport):
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peercert":
            return {"subject": ((("commonName", "cert"),),)}
        return super().get_extra_info(name, default)


async def test_a_reload_before_the_first_line_of_a_client_with_a_certificate(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text('[cert]\nprefixes = ["old/"]\n' + sections("a"))
    authenticator = Authenticator(None, str(file), certificates_required=True, stats=Stats())
    handler = FollowerHandler(Stats(), "genie", 1 << 20, Starting)
    connection = Connection(handler, Limits(), AdmissionControl(Limits()), authenticator)
    connection.connection_made(WithCertificate(lambda _: None))
    file.write_text('[cert]\nprefixes = ["new/"]\n' + sections("a"))
    await authenticator.reload(None, str(file))
    assert connection.principal is not None
    connection.reauthorize(authenticator.reauthorize(connection.principal, connection.certificate))
    connection.data_received(b'{"command":"ping"}\n')
    assert connection.principal.prefixes == ("new/",)
    assert connection.certificate == "cert", "a later reload finds its entry"


def test_a_part_of_a_token_file_executes_a_bounded_number_of_instructions(tmp_path: Path) -> None:
    counts = []
    for principals in (200, 2_000):
        file = tmp_path / "tokens"
        file.write_text(sections(*[f"p{number}" for number in range(principals)]))
        parts = AccessControl.load_in_parts(None, str(file))
        longest, is_loaded = 0, False
        while not is_loaded:
            counter = OpcodeCounter()
            counter.start()
            is_loaded = next(parts, True) is not None
            counter.stop()
            longest = max(longest, counter.count)
        counts.append(longest)
    assert counts[1] < 1.1 * counts[0], "whatever the size of the file"
    assert counts[1] < 3_000 * access.SECTIONS_PER_PART


TRICKY = '''
[a]
token = "token-of-the-principal-a"
prefixes = [
"x/",
"""
[b]
token = "not a section"
""",
]
  [c]
  token = "token-of-the-principal-c"
# [d]
'''


def test_what_looks_like_a_section_in_a_text_or_a_list_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "SECTIONS_PER_PART", 1)
    monkeypatch.setattr(access, "_CONTROL_CHARACTERS", access.re.compile("\0"))
    file = tmp_path / "tokens"
    file.write_text(TRICKY)
    loaded = AccessControl.load(None, str(file))
    assert loaded.by_token(token("a")).prefixes == ("x/", '[b]\ntoken = "not a section"\n')  # type: ignore[union-attr]
    assert loaded.by_token(token("c")) is not None
    assert loaded.by_name("b") is None
    for invalid in ("[a]\n" + sections("a"), sections("a", "b") + "[a.more]\nx = 1", sections("a", "b") + "[c"):
        file.write_text(invalid)
        with pytest.raises(ValueError, match="GENIE_TOKEN_FILE"):
            AccessControl.load(None, str(file))
