"""Errors of the commands name the option or the variable of an invalid value, and the program that listens on a port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from genie.cli import port_probe
from genie.cli.port_probe import describe_listener
from support.network.certificates import Certificates
from support.processes.commands import genie_cli
from support.processes.ports import free_port
from support.processes.servers import Genie, running_redis, running_server

TOKEN = "t" * 20
HOST, EVERYWHERE = "127.0.0.1", "0.0.0.0"  # noqa: S104 - nothing listens there


@pytest.mark.parametrize(
    ("command", "option", "variable", "value", "expected"),
    [
        (("serve",), "--port", "port", "abc", "a port is a number from 0 to 65535, not 'abc'"),
        (("serve",), "--port", "port", "70000", "a port is a number from 0 to 65535, not '70000'"),
        (("serve",), "--admin-port", "admin_port", "abc", "a port is a number from 0 to 65535, not 'abc'"),
        (("serve",), "--redis-port", "redis_port", "0", "a port is a number from 1 to 65535, not '0'"),
        (("serve",), "--token", "token", "short", "must have 16 to 1024 characters, and has 5"),
        (("serve",), "--token-file", "token_file", "/no/file", ": /no/file can't be read"),
        (("serve",), "--tls-cert", "tls_cert", "/no/file", ": /no/file can't be read"),
        (("serve",), "--lease", "lease", "x", "a number from 0.1 to 3600 is needed, not 'x'"),
        (("serve",), "--lease", "lease", "0", "a number from 0.1 to 3600 is needed, not '0'"),
        (("serve",), "--slow-wait", "slow_wait", "nan", "a number of at least 0 is needed, not 'nan'"),
        (("serve",), "--max-line", "max_line", "1.5", "a whole number of at least 1024 is needed, not '1.5'"),
        (("serve",), "--advertise", "advertise", "host", "must be one HOST:PORT or [IPv6]:PORT, not 'host'"),
        (("serve",), "--host", "host", EVERYWHERE, "would allow unauthenticated access"),
        (("serve",), "--namespaces", "namespace", "a b", "1 to 128 letters"),
        (("status",), "--port", "port", "abc", "a port is a number from 1 to 65535, not 'abc'"),
        (("status",), "--namespace", "namespace", "a b", "1 to 128 letters"),
        (("run", "a", "--", "true"), "--port", "port", "0", "a port is a number from 1 to 65535, not '0'"),
        (("top",), "--admin-port", "admin_port", "abc", "a port is a number from 1 to 65535, not 'abc'"),
        (("top",), "--admin-host", "admin_host", "a/b", "must be a host name or an address"),
        (("top",), "--admin-port", "admin_port", "", "is empty"),
    ],
)
def test_an_error_names_the_source_of_the_value(
    command: tuple[str, ...], option: str, variable: str, value: str, expected: str
) -> None:
    by_option = genie_cli(command[0], option, value, *command[1:])
    by_variable = genie_cli(*command, **{variable: value})
    name = f"GENIE_{variable.upper()}"
    for done, source, other in ((by_option, option, name), (by_variable, name, option)):
        message = next(line for line in done.stderr.splitlines() if line.startswith("genie: "))
        assert done.returncode == 2
        assert source in message
        assert other not in message
        assert expected in message


@pytest.mark.parametrize("source", ["--token-file", "GENIE_TOKEN_FILE"])
def test_an_error_in_a_token_file_names_the_source_of_its_path(source: str, tmp_path: Path) -> None:
    file = tmp_path / "tokfile"
    file.write_text("short\n")
    done = genie_cli("serve", source, str(file)) if source.startswith("--") else genie_cli("serve", token_file=file)
    expected = f"genie: {source}: {file}: the token must have 16 to 1024 characters, and has 5\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_contradictory_options_are_a_usage_error() -> None:
    for options in (["--redis-fsync"], ["--token", TOKEN, "--token-file", "f"], ["--tls-key", "f"]):
        done = genie_cli("serve", *options)
        assert (done.returncode, done.stdout) == (2, ""), options
        assert options[0] in done.stderr


# -- a port that is already in use --------------------------------------------------------------------


def test_a_second_server_reports_the_first() -> None:
    with running_server(admin_port=free_port()) as first:
        done = genie_cli("serve", **first.settings)
        on_its_admin_port = genie_cli("serve", port=free_port(), admin_port=first.settings["admin_port"])
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{first.port}: another Genie server (" in done.stderr
    assert "listens there already; GENIE_PORT chooses the port" in done.stderr
    assert "admin port" not in done.stderr
    assert on_its_admin_port.returncode == 1
    assert f"cannot listen on the admin port 127.0.0.1:{first.settings['admin_port']}: " in on_its_admin_port.stderr


@pytest.mark.parametrize("host", [HOST, EVERYWHERE])
def test_the_two_ports_of_a_server_must_differ(host: str) -> None:
    port = free_port()
    done = genie_cli("serve", host=host, insecure=1, port=port, admin_port=port)
    assert done.returncode == 1
    assert f"cannot listen on the admin port 127.0.0.1:{port}: " in done.stderr
    assert "set GENIE_ADMIN_PORT" in done.stderr


def test_a_second_server_reports_the_first_one_that_waits_for_its_store() -> None:
    """The first server listens on both ports already, and rejects commands."""
    with running_redis() as redis:
        redis.kill()
        first = Genie(redis, admin_port=free_port())
        first.start(wait=False)
        try:
            first.until("store unavailable")
            done = genie_cli("serve", **first.settings)
        finally:
            first.kill()
    assert f"cannot listen on 127.0.0.1:{first.port}: another Genie server listens there already" in done.stderr


@pytest.mark.parametrize("kind", ["open", "with a token", "with TLS"])
def test_probe_recognizes_a_genie_server(kind: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "open": dict,
        "with a token": lambda: {"token": TOKEN},
        "with TLS": lambda: {"tls_cert": Certificates(tmp_path).server},
    }[kind]()
    with running_server(**settings) as server:
        description = describe_listener(*server.address)
    assert description.startswith("another Genie server")
    assert (" (" in description) is (kind == "open")


@pytest.mark.parametrize(
    "reply",
    [b"-ERR unknown command\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n", b'{"command":"hi"}\n', b"\n", b""],
)
def test_probe_recognizes_other_programs(reply: bytes) -> None:
    with listener(reply) as port:
        assert describe_listener(HOST, port).startswith("a program that is not a Genie server")


def test_probe_of_a_program_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_probe, "PROBE_TIMEOUT_S", 0.05)
    with listener(None) as port:
        assert describe_listener(HOST, port) == "a program that did not respond within 0.05 s"


def test_probe_of_a_port_without_a_listener() -> None:
    assert describe_listener(HOST, free_port()) == ""


@contextmanager
def listener(reply: bytes | None) -> Iterator[int]:
    """Listen on a port; reply to the first data of each connection and close it. None: never reply."""
    with socket.create_server((HOST, 0)) as server:
        connections: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connections.append(connection)
                if reply is not None:
                    with suppress(OSError):
                        connection.recv(1024)
                        connection.sendall(reply)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


LINK = "tcp://10.96.3.4:7077"


def test_service_links_of_kubernetes_are_ignored_by_every_command(genie: Genie) -> None:
    address = f"127.0.0.1:{genie.port}"
    for command in (("inspect",), ("run", "linked", "--", "true")):
        done = genie_cli(*command, host=address, port=LINK)
        assert done.returncode == 0, done.stderr
        assert done.stderr == (
            f"genie: GENIE_PORT={LINK} ignored: it is a Kubernetes service link (enableServiceLinks)\n"
        )
    shown = genie_cli("config", "show", "--json", port=LINK, admin_port=LINK, redis_port=LINK)
    assert shown.returncode == 0, shown.stderr
    assert [line.split("=")[0] for line in shown.stderr.splitlines()] == [
        f"genie: {variable}" for variable in ("GENIE_PORT", "GENIE_REDIS_PORT", "GENIE_ADMIN_PORT")
    ]
