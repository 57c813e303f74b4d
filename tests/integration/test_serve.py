"""`genie serve`: options, errors, log, and the connection to Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager

import pytest
from click.testing import CliRunner

from genie.cli import main
from genie.cli.serve import serve
from genie.config import Settings
from support.network.wire import Wire
from support.processes.commands import genie_cli
from support.processes.ports import free_port
from support.processes.programs import CLI
from support.processes.servers import WAIT_S, Genie, running_redis, running_server
from support.processes.terminal import Terminal, terminal


def test_every_option_names_its_variable() -> None:
    text = CliRunner().invoke(main, ["serve", "--help"]).output
    for option in serve.params:
        assert option.envvar, option.name
        for variable in [option.envvar] if isinstance(option.envvar, str) else option.envvar:
            assert variable in text


def test_every_setting_is_an_option() -> None:
    options = {option.name for option in serve.params}
    assert set(Settings().options()) <= options
    assert options - set(Settings().options()) == {"config", "redis_host", "redis_port"}


SIGHUP_DURING_START = """
import os, signal
from genie.cli import main
from genie.server.app import Server

bind_address = Server.bind_address

def bind_address_after_sighup(server):
    os.kill(os.getpid(), signal.SIGHUP)
    return bind_address(server)

Server.bind_address = bind_address_after_sighup
main(["serve"])
"""


class SignalledAtStart(Genie):
    """A server that receives SIGHUP before it has a handler for it."""

    def spawn(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SIGHUP_DURING_START], env=environment, stdout=subprocess.PIPE)


def test_sighup_during_the_start_is_a_reload() -> None:
    server = SignalledAtStart()
    try:
        server.start(wait=False)
        server.until("reload skipped")
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "70000"], "port"),
        (["--port", "x"], "port"),
        (["--log-level", "loud"], "log-level"),
        (["--redis-url", "http://x"], "redis"),
        (["--redis-host", "127.0.0.1", "--namespace", "a b{"], "namespace"),
        (["--advertise", "foo"], "--advertise: must be one HOST:PORT or [IPv6]:PORT, not 'foo'"),
        (["--advertise", "foo:0"], "--advertise"),
        (["--advertise", "::1:7077"], "--advertise"),
        (["--advertise", "genies://foo:7077"], "--advertise"),
        (["--host", "203.0.113.7"], "203.0.113.7"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--host", "a..b"], "cannot listen on a..b:0: "),
    ],
)
def test_an_invalid_setting_is_one_error(arguments: list[str], expected: str) -> None:
    port = ["--port", "0"] if "--port" not in arguments else []
    done = genie_cli("serve", *port, *arguments, admin_port="")
    assert done.returncode != 0
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("genie: ")]) == 1


@pytest.mark.parametrize(("level", "connections"), [("info", []), ("debug", ["connection"])])
async def test_log_of_a_server_in_memory(level: str, connections: list[str]) -> None:
    with running_server(log_level=level) as genie:
        genie.until("locks are kept in memory only")
        client = await Wire.connect(genie.address)
        await client.release(await client.lock("exclusive:a"))
        await client.close()
        genie.send(signal.SIGTERM)
        genie.until("server stopped")
        events = [line["event"].split()[0] for line in genie.log]
        assert events == ["listening", "locks", *connections, "server"]
        assert {next(iter(line)) for line in genie.log} == {"event"}


async def test_redis_may_start_after_the_server() -> None:
    with running_redis() as redis:
        redis.kill()
        genie = Genie(redis)
        genie.start(wait=False)
        try:
            genie.until("store unavailable")
            redis.start()
            genie.until("listening")
            client = await Wire.connect(genie.address)
            await client.lock("exclusive:a")
            await client.close()
        finally:
            genie.kill()


async def test_redis_host_and_port_select_redis() -> None:
    with running_redis() as redis:
        genie = Genie(redis_host="127.0.0.1", redis_port=redis.port, namespace="shop")
        genie.start()
        try:
            assert genie.log[-1]["store"] == "redis"
            client = await Wire.connect(genie.address)
            await client.lock("exclusive:a")
            assert redis.call("EXISTS", "{shop}:meta") == 1
            await client.close()
        finally:
            genie.kill()


async def test_a_password_and_a_database_are_used() -> None:
    with running_redis() as redis:
        redis.call("CONFIG", "SET", "requirepass", "secret")
        genie = Genie()
        genie.redis_url = f"redis://:secret@127.0.0.1:{redis.port}/3"
        genie.start()
        try:
            client = await Wire.connect(genie.address)
            await client.lock("exclusive:a")
            await client.close()
        finally:
            genie.kill()


def test_sigterm_ends_a_server_that_waits_for_redis() -> None:
    genie = Genie()
    genie.redis_url = f"redis://127.0.0.1:{free_port()}/0"
    genie.start(wait=False)
    genie.until("store unavailable")
    genie.send(signal.SIGTERM)
    assert genie.wait() == 0


@pytest.mark.parametrize("further", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM], ids=lambda signal: signal.name)
def test_a_signal_after_the_stop_does_not_change_the_exit_status(further: signal.Signals) -> None:
    command, environment = (
        [*CLI, "serve", "--admin-port", "", "--port", "0"],
        {**os.environ, "GENIE_LOG_FORMAT": "json"},
    )
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for event in (b"locks are kept in memory", b"server stopped"):
            while event not in process.stdout.readline():
                pass
            process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            process.send_signal(further)
        assert process.returncode == 0


def test_a_closed_stdout_does_not_stop_the_server() -> None:
    environment = {**os.environ, "GENIE_PORT": str(free_port()), "GENIE_ADMIN_PORT": ""}
    process = subprocess.Popen([sys.executable, "-m", "genie.cli", "serve"], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    asyncio.run(ping_three_times(("127.0.0.1", int(environment["GENIE_PORT"]))))
    process.terminate()
    assert process.wait(WAIT_S) == 0


async def ping_three_times(address: tuple[str, int]) -> None:
    for _ in range(3):
        client = await Wire.connect(address)
        client.send("ping")
        await client.expect("pong")
        await client.close()


def test_console_logs_are_not_json() -> None:
    settings = {"GENIE_LOG_FORMAT": "console", "GENIE_PORT": str(free_port()), "GENIE_ADMIN_PORT": ""}
    environment = {**os.environ, **settings}
    process = subprocess.Popen(
        [sys.executable, "-m", "genie.cli", "serve"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert "listening" in line
    assert not line.startswith("{")


def serving_on_a_terminal(**settings: object) -> AbstractContextManager[Terminal]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    variables = {f"GENIE_{name.upper()}": str(value) for name, value in settings.items()}
    return terminal([*CLI, "serve"], clean | variables)


def test_a_terminal_shows_where_the_server_is() -> None:
    port, admin_port = free_port(), free_port()
    with serving_on_a_terminal(port=port, admin_port=admin_port) as shown:
        lines = shown.until("listening").splitlines()
        assert lines[:3] == [
            f"Clients connect to 127.0.0.1:{port}.",
            f"Status page: http://127.0.0.1:{admin_port}/",
            "Locks are kept in memory: they are lost when this process ends.",
        ]


def test_a_terminal_shows_where_the_server_is_while_it_waits_for_a_leader() -> None:
    redis_port = free_port()
    url = f"redis://genie:secret@127.0.0.1:{redis_port}/3"
    with serving_on_a_terminal(port=0, admin_port="", redis_url=url) as shown:
        text = shown.until("store unavailable")
        lines = text.splitlines()
        assert lines[0].startswith("Clients connect to 127.0.0.1:")
        assert lines[0] != "Clients connect to 127.0.0.1:0."
        assert lines[1:3] == [
            "No status page: GENIE_ADMIN_PORT is empty.",
            f"Locks are kept in Redis at 127.0.0.1:{redis_port}, database 3.",
        ]
        assert "secret" not in text
        assert "listening" not in text


def test_json_logs_on_a_terminal_have_no_other_lines() -> None:
    with serving_on_a_terminal(port=0, admin_port="", log_format="json") as shown:
        assert shown.until("listening").startswith("{")
