"""`genie serve` under systemd: the notifications, on real sockets, and the unit file."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.config import Settings
from genie.server.app import Server
from support.processes.servers import WAIT_S, Genie, Redis, running_redis

UNIT = Path(__file__).parents[2] / "deploy/systemd/genie.service"


class ServiceManager:
    """The socket of systemd: receives the notifications of a server."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self._sock.settimeout(WAIT_S)

    def receive(self) -> dict[str, str]:
        """Return the fields of the next datagram."""
        return dict(line.split("=", 1) for line in self._sock.recv(4096).decode().split("\n"))

    def until(self, name: str, value: str | None = None) -> dict[str, str]:
        """Return the next datagram with this field, and this value if one is given."""
        while True:
            fields = self.receive()
            if fields.get(name) is not None and value in (None, fields[name]):
                return fields

    def close(self) -> None:
        self._sock.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@genie-tests-{uuid.uuid4()}"
    manager = ServiceManager(address)
    yield manager
    manager.close()


STARTING = "starting, the store has not answered yet"


class Supervised(Genie):
    """A server with the environment of a unit."""

    def __init__(self, systemd: ServiceManager, redis: Redis | None = None, watchdog_us: str = "", **settings: object):
        super().__init__(redis, **settings)
        self.unit = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": watchdog_us}

    def spawn(self, environment):  # type: ignore[no-untyped-def]
        return super().spawn({**environment, **self.unit})


@pytest.fixture
def servers() -> Iterator[list[Genie]]:
    started: list[Genie] = []
    yield started
    for server in started:
        server.kill()


def test_a_server_reports_its_start_and_its_stop(systemd: ServiceManager, servers: list[Genie]) -> None:
    servers.append(server := Supervised(systemd))
    server.start()
    assert systemd.receive() == {"STATUS": STARTING}
    assert systemd.receive() == {"READY": "1", "STATUS": "leader"}
    server.send(signal.SIGTERM)
    assert systemd.receive() == {"STOPPING": "1", "STATUS": "stopping"}, "no watchdog messages without WATCHDOG_USEC"
    assert server.wait() == 0


def test_a_server_without_a_store_is_not_ready(systemd: ServiceManager, servers: list[Genie]) -> None:
    with running_redis() as redis:
        redis.kill()
        servers.append(server := Supervised(systemd, redis, watchdog_us="200000"))
        server.start(wait=False)
        first = systemd.receive()
        assert first == {"WATCHDOG": "1", "STATUS": STARTING}
        assert systemd.until("STATUS")["STATUS"].startswith("store unavailable since ")
        assert [systemd.receive() for _ in range(3)] == [{"WATCHDOG": "1"}] * 3
        server.send(signal.SIGHUP)  # must not end the start
        assert server.until("reload skipped")
        assert systemd.receive() == {"WATCHDOG": "1"}
        redis.start()
        redis.create_namespace()
        assert systemd.until("READY")["STATUS"] == "leader"


def test_the_status_names_the_leader(systemd: ServiceManager, servers: list[Genie]) -> None:
    with running_redis() as redis:
        redis.create_namespace()
        servers.append(leader := Genie(redis))
        leader.start()
        servers.append(follower := Supervised(systemd, redis))
        follower.start()
        role = f"follower of 127.0.0.1:{leader.port}"
        assert systemd.until("READY")["STATUS"] in (role, f"{role}, its replica has not caught up")
        leader.send(signal.SIGTERM)
        assert systemd.until("STATUS", "leader") == {"STATUS": "leader"}


def test_each_of_several_namespaces_has_its_status(systemd: ServiceManager, servers: list[Genie]) -> None:
    servers.append(server := Supervised(systemd, namespaces="orders,wallets"))
    server.start()
    # The server is ready when it leads the first of them.
    both = "orders: leader, wallets: leader"
    assert systemd.until("READY")["STATUS"] == both or systemd.until("STATUS", both)


def test_the_watchdog_stops_with_the_event_loop(systemd: ServiceManager, servers: list[Genie]) -> None:
    servers.append(server := Supervised(systemd, watchdog_us="100000"))
    server.start()
    systemd.until("READY")
    assert systemd.receive() == systemd.receive() == {"WATCHDOG": "1"}
    server.send(signal.SIGSTOP)
    systemd._sock.settimeout(0.5)
    with pytest.raises(TimeoutError):
        for _ in range(100):  # those of before the stop may wait in the socket
            systemd.receive()
    systemd._sock.settimeout(WAIT_S)
    server.send(signal.SIGCONT)
    assert systemd.receive() == {"WATCHDOG": "1"}


def test_the_watchdog_of_another_process_gets_no_messages(systemd: ServiceManager, servers: list[Genie]) -> None:
    servers.append(server := Supervised(systemd, watchdog_us="100000"))
    server.unit["WATCHDOG_PID"] = "1"
    server.start()
    assert systemd.receive() == {"STATUS": STARTING}
    assert systemd.receive() == {"READY": "1", "STATUS": "leader"}
    server.send(signal.SIGTERM)
    assert systemd.receive()["STOPPING"] == "1"


def test_a_reload_is_reported(systemd: ServiceManager, servers: list[Genie], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-tests")
    token.chmod(0o600)
    servers.append(server := Supervised(systemd, token_file=token))
    server.start()
    systemd.until("READY")
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    server.send(signal.SIGHUP)
    reloading = systemd.receive()
    assert reloading.pop("RELOADING") == "1"
    assert before <= int(reloading.pop("MONOTONIC_USEC")) / 1e6 <= time.clock_gettime(time.CLOCK_MONOTONIC)
    assert reloading == {}
    assert systemd.receive() == {"READY": "1", "STATUS": "leader"}
    assert server.until("access tokens reloaded")


@pytest.mark.parametrize("address", ["/no/such/folder/notify", "vsock:2:1"])
def test_a_server_runs_without_a_receiver(address: str, servers: list[Genie]) -> None:
    servers.append(server := Genie())
    server.settings["port"] = server.port
    spawn = server.spawn
    server.spawn = lambda environment: spawn({**environment, "NOTIFY_SOCKET": address})  # type: ignore[method-assign]
    server.start()
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    server.until("server stopped")
    warnings = [line for line in server.log if line["event"].startswith(("NOTIFY_SOCKET", "systemd"))]
    assert len(warnings) == 1, "one warning, not one for each message"


# -- the unit file ------------------------------------------------------------------------------------------


def unit_settings() -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE):
        settings.setdefault(name, []).append(value)
    return settings


def test_the_unit_fits_the_server() -> None:
    from genie.config import Settings
    from genie.server.systemd import STATUS_INTERVAL_S

    settings = unit_settings()
    assert settings["Type"] == ["notify"]
    assert float(settings["WatchdogSec"][0].removesuffix("s")) >= 5 * STATUS_INTERVAL_S
    assert float(settings["TimeoutStopSec"][0].removesuffix("s")) > 2 * Settings().drain_timeout_ms / 1000
    assert int(settings["LimitNOFILE"][0]) > Settings().limits.max_connections


def test_the_server_can_read_the_boot_id() -> None:
    """Without the boot id, a leader that systemd has restarted waits for its own lease. ProcSubset hides it."""
    assert unit_settings().get("ProcSubset", ["all"]) == ["all"]


def systemd_analyze(*arguments: str) -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "genie"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "genie.service"
    unit.write_text(UNIT.read_text().replace("/opt/genie/bin/genie", str(program)))
    output = systemd_analyze("verify", "--man=no", str(unit))
    assert "genie.service" not in output


def test_the_sandbox_of_the_unit_exposes_little() -> None:
    output = systemd_analyze("security", "--offline=true", "--threshold=15", str(UNIT))
    assert "Overall exposure level" in output


@pytest.mark.parametrize("fds", ["", "0", "1", "5", "-1", "99999999999999999999", "x", "\u0663"])
def test_variables_of_socket_activation_are_ignored(fds: str, systemd: ServiceManager, servers: list[Genie]) -> None:
    servers.append(server := Supervised(systemd))
    server.unit |= {"LISTEN_FDS": fds, "LISTEN_PID": "1", "LISTEN_FDNAMES": "genie:\u202e"}
    server.start()
    assert systemd.until("READY")["STATUS"] == "leader"
    server.send(signal.SIGTERM)
    assert server.wait() == 0


class Recording:
    """Records the messages to the service manager."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def reloading(self) -> None:
        self.sent.append("reloading")

    def ready(self) -> None:
        self.sent.append("ready")


async def _reloaded(server: Server) -> None:
    assert server._reloading is not None
    await server._reloading


async def test_a_reload_while_the_server_stops_does_not_report_it_as_ready(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-the-tests")
    server = Server(Settings.from_options(port=0, token_file=str(tokens)))
    await server.start()
    try:
        server._service_manager = recording = Recording()  # type: ignore[assignment]
        for _ in range(2):
            server._on_sighup()
            await _reloaded(server)
        assert recording.sent == ["reloading", "ready"] * 2
        tokens.write_text("another-token-of-the-tests")
        server._stopped.set()
        server._on_sighup()
        await _reloaded(server)
        assert recording.sent == ["reloading", "ready"] * 2
        assert server.access.by_token("a-token-of-the-tests") is None, "a token can be revoked during the drain"
    finally:
        server._service_manager = None
        await server.stop()


def test_the_unit_has_a_folder_for_the_history() -> None:
    settings = unit_settings()
    assert settings["StateDirectory"] == ["genie"], "everything else is read-only"
    variables = (UNIT.parent / "genie.env").read_text()
    assert "GENIE_HISTORY_DIR=/var/lib/genie/" in variables
