"""No command prints a character that controls a terminal, whatever the names, notes and errors contain.

The server runs in this process, without its check for control characters: a command must not rely on the check of a server,
which may have another version, or be another program.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from click.testing import CliRunner, Result

import genie.cli
import genie_ledger.cli
from genie.admin import AdminServer
from genie.config import Settings
from genie.history.search import Query, search
from genie.protocol import diagnostics, resources
from genie.server.app import Server
from support.network.wire import Wire
from support.processes.commands import genie_cli
from support.processes.programs import start_genie
from support.processes.waiting import until
from support.runs.hostile_text import assert_printable, of

ALLOWED = "\u202e \u2066 \u2028 \U000e0041"
"""The characters that the protocol allows in names: no control characters."""
LONG = {"queueTimeout": 600_000, "transactionTimeout": 600_000}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Hostile(NamedTuple):
    """A server with hostile names: its ports, the folder of its history, and the ids of requests.

    `allowed` is held, and its names have only characters that the protocol allows.
    """

    port: int
    admin_port: int
    history: Path
    held: int
    waiting: int
    allowed: int

    def run(self, *args: str) -> subprocess.CompletedProcess[str] | Result:
        if args[0] in ("history", "replay"):  # in this process, because the reader of the files checks the names, too
            return CliRunner().invoke(genie.cli.main, args, env={"GENIE_HISTORY_DIR": str(self.history)})
        ids = {"HELD": str(self.held), "WAITING": str(self.waiting), "ALLOWED": str(self.allowed)}
        return genie_cli(
            *(ids.get(arg, arg) for arg in args), port=self.port, admin_port=self.admin_port, history_dir=self.history
        )


@pytest.fixture
async def hostile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Hostile]:
    for module in (resources, diagnostics):
        monkeypatch.setattr(module, "CONTROL_CHARACTERS", re.compile("(?!)"))
    server = Server(Settings.from_options(port=0, admin_port=0, history_dir=str(tmp_path), slow_wait=0))
    admin = AdminServer(server)
    host, port = await server.start()
    await admin.start()
    assert admin.address is not None
    try:
        first, second = await Wire.connect((host, port)), await Wire.connect((host, port))
        names = {"note": of("note"), "traceparent": TRACE, **LONG}
        held = await first.lock(f"exclusive:{of('one')}", transactionName=of("t1"), **names)
        await second.lock(f"exclusive:{of('two')}", transactionName=of("t2"), **names)
        waiting = await second.request(f"exclusive:{of('one')}", transactionName=of("t2"), **names)
        victim = await first.request(f"exclusive:{of('two')}", transactionName=of("t1"), **names)
        assert victim
        await first.expect("released")
        allowed = await first.lock(f"exclusive:a{ALLOWED}", transactionName=f"t3{ALLOWED}", **LONG)
        yield Hostile(port, admin.address[1], tmp_path, held, waiting, allowed)
        await first.close()
        await second.close()
    finally:
        await admin.stop()
        await server.stop()


COMMANDS = (
    (("inspect",), "note"),
    (("inspect", "--json"), "note"),
    (("explain", "WAITING"), "one"),
    (("explain", "HELD"), ""),
    (("explain", "ALLOWED"), "Holds: exclusive:a"),
    (("explain", "WAITING", "--json"), "one"),
    (("waits",), "one"),
    (("waits", "--dot"), "one"),
    (("waits", "--json"), "one"),
    (("top", "--once"), "one"),
    (("top", "--json"), "one"),
    (("deadlocks",), "one"),
    (("deadlocks", "--json"), "one"),
    (("order",), "one"),
    (("order", "--dot"), "one"),
    (("order", "--json"), "one"),
    (("history",), "note"),
    (("history", "--json"), "note"),
    (("replay",), "one"),
    (("replay", "--json"), "one"),
    (("status",), ""),
    (("status", "--json"), ""),
    (("release", "--prefix", "one", "--yes"), "one"),
    (("release", "--transaction", of("t2"), "--yes"), ""),
    (("release", "--transaction", f"t3{ALLOWED}", "--yes"), "exclusive:a"),
    (("release", "HELD", "--json"), ""),
    (("release", "--transaction", "none"), ""),
    (("run", "--no-wait", "--host", "127.0.0.1", f"exclusive:{of('one')}", "--", "true"), ""),
    (("history", of("one")), "note"),
    (("history", "--namespace", of("x")), ""),
    (("run", "a", "--", of("program")), ""),
    (("inspect", "--id", of("x")), ""),
    ((of("command"),), ""),
    (("release", "--transaction", of("x" * 600)), ""),
)
"""Each command, with a text that shows that it printed a hostile value."""


@pytest.mark.parametrize(("args", "expects"), COMMANDS, ids=ascii)
async def test_the_output_of_a_command_is_printable(hostile: Hostile, args: tuple[str, ...], expects: str) -> None:
    if args[0] in ("history", "replay") and expects:
        await until(lambda: search(hostile.history / "genie", Query()).requests)  # written in a thread
    result = await asyncio.to_thread(hostile.run, *args)
    assert "Traceback" not in result.stderr, result.stderr
    assert_printable(result.stdout, expects=expects)
    assert_printable(result.stderr)
    if "--json" in args and expects:
        assert of(expects) in " ".join(strings(json.loads(result.stdout))), "JSON has the exact value"


def strings(value: object) -> Iterator[str]:
    """Yield all keys and strings of a JSON document."""
    if isinstance(value, dict):
        yield from value
        yield from strings(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("options", [(), ("--json",)])
async def test_watched_changes_are_printable(hostile: Hostile, options: tuple[str, ...]) -> None:
    def first_line() -> str:
        environment = dict(os.environ) | {"PYTHONIOENCODING": "utf-8", "GENIE_PORT": str(hostile.port)}
        with start_genie("watch", "one", *options, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                return str(process.stdout.readline())
            finally:
                process.kill()

    output = await asyncio.to_thread(first_line)
    assert_printable(output.removesuffix("\n"), expects="one")
    if options:
        assert json.loads(output)["resource"] == of("one")


SERVER_COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("inspect",),
    ("explain", "7"),
    ("waits",),
    ("release", "7"),
    ("release", "--prefix", "a", "--yes"),
    ("watch", "a"),
    ("run", "a", "--", "true"),
    ("bench", "own", "--connections", "1", "--seconds", "0.1", "--warm-up", "0"),
    ("bench", "own", "--json", "--connections", "1", "--seconds", "0.1", "--warm-up", "0"),
)
WELCOME = {"protocol": 1, "server": of("server"), "namespace": "n", "resumed": False, "quiet": True}


@pytest.mark.parametrize("rejects_hello", [False, True])
@pytest.mark.parametrize("args", SERVER_COMMANDS, ids=" ".join)
async def test_what_another_server_sends_is_printable(args: tuple[str, ...], rejects_hello: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for message in messages(reader):
            ref = {"ref": message["payload"]["ref"]} if "ref" in message["payload"] else {}
            if message["command"] == "hello" and not rejects_hello:
                reply = {"command": "welcome", "payload": WELCOME | ref}
            elif message["command"] == "ping":
                reply = {"command": "pong", "payload": ref}
            elif message["command"] == "inspect" and "status" in args:
                reply = {"command": "inspected", "payload": {"holdersTotal": of("n"), "queueTotal": of("n")} | ref}
            else:
                reply = {"command": "error", "payload": {"code": of("code"), "message": of("message")} | ref}
            writer.write(orjson.dumps(reply) + b"\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        result = await asyncio.to_thread(genie_cli, *args, host="127.0.0.1", port=port)
    assert "Traceback" not in result.stderr
    assert_printable(result.stdout)
    assert_printable(result.stderr)
    assert "server" in result.stdout or "message" in result.stderr


async def messages(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a connection until it ends."""
    with contextlib.suppress(OSError):
        while received := await reader.readline():
            yield orjson.loads(received)


# -- The code -----------------------------------------------------------------------------------------


def test_commands_print_only_by_the_functions_that_escape() -> None:
    folder = Path(genie.cli.__file__).parent
    ledger = Path(genie_ledger.cli.__file__).parent
    printing = {
        path.relative_to(folder if path.is_relative_to(folder) else ledger).as_posix()
        for path in [*folder.rglob("*.py"), *ledger.rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("click.echo", "click.secho", "print", "sys.stdout.write")
    }
    assert printing == {"output.py"}
