"""`genie top`, with and without a terminal, at a fake admin port and at real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

import msgspec
import pytest

from genie.admin.models import Problem
from genie.version import VERSION
from support.admin.fake_admin import FakeAdmin, fake_admin
from support.admin.observations import HOT, NOW, WAITS, state
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.programs import run_genie
from support.processes.servers import WAIT_S, Redis, running_server
from support.processes.terminal import Terminal, terminal

HOUR_MS = 3_600_000


def environment() -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GENIE_") and name not in DISPLAY_VARIABLES
    }
    return clean | {"PYTHONIOENCODING": "utf-8", "TERM": "xterm"}


DISPLAY_VARIABLES = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def command(name: str, port: int, *args: str) -> list[str]:
    return [sys.executable, "-m", "genie.cli", name, *args, "--admin-port", str(port)]


def genie_top(port: int, *args: str) -> subprocess.CompletedProcess[str]:
    return genie_cli("top", port, *args)


def genie_cli(name: str, port: int, *args: str) -> subprocess.CompletedProcess[str]:
    return run_genie(name, *args, "--admin-port", str(port), env=environment(), timeout=WAIT_S)


def on_terminal(port: int, *args: str, columns: int = 100, rows: int = 30) -> AbstractContextManager[Terminal]:
    return terminal(command("top", port, *args), environment(), columns, rows)


def set_state(admin: FakeAdmin, **changes: object) -> None:
    admin.responses |= {"/api/state": state(**changes), "/api/waits": WAITS, "/api/hot": HOT}


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with fake_admin() as server:
        set_state(server)
        yield server


def test_without_a_terminal_one_snapshot_is_printed(admin: FakeAdmin) -> None:
    shown = genie_top(admin.port)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"genie {VERSION}  leader  namespace genie ")
    assert "[red]x\\x1b[31m" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "q: quit" not in shown.stdout


def test_once_prints_one_snapshot_of_the_terminal_s_width(admin: FakeAdmin) -> None:
    with on_terminal(admin.port, "--once", columns=60) as term:
        assert term.wait() == 0
        lines = term.written.splitlines()
    assert lines[0].startswith(f"genie {VERSION}")
    assert "\x1b" not in term.written
    assert max(map(len, lines)) <= 60


def test_json_prints_the_state(admin: FakeAdmin) -> None:
    printed = genie_top(admin.port, "--json", "--once").stdout
    assert json.loads(printed) == json.loads(msgspec.json.encode(state()))


def test_it_refreshes_until_q_is_pressed(admin: FakeAdmin) -> None:
    with on_terminal(admin.port, "--every", "0.1") as term:
        assert "grants 1,200/s" in term.until("Hot resources")
        assert "accounts/1[red]x\\x1b[31m" in term.written
        assert "\x1b[31m" not in term.written
        set_state(admin, held=4_711)
        term.until("held 4,711")
        term.resize(columns=50, rows=12)
        narrow = term.screen("Longest queues (2 of 20)")
        assert "held 4,711" in narrow
        assert "HOLDER" in narrow
        assert "HELD FOR" not in narrow
        assert "Hot" not in narrow
        term.press(b"xQ")
        assert term.wait() == 0
        assert term.modes() == term.initial_modes
    assert term.written.endswith("\x1b[?25h\x1b[?1049l")  # shows the cursor, and leaves the alternate screen


def test_a_question_mark_shows_and_hides_the_help(admin: FakeAdmin) -> None:
    with on_terminal(admin.port, "--every", "0.1") as term:
        term.until("?: help  q: quit")
        term.press(b"?")
        shown = term.screen("show or hide this help")
        assert "genie explain ID" in shown
        assert "Longest queues" in shown
        term.press(b"?")
        assert "show or hide" not in term.screen("grants 1,200/s")
        term.press(b"?q")
        assert term.wait() == 0


def test_ctrl_c_restores_the_terminal(admin: FakeAdmin) -> None:
    with on_terminal(admin.port) as term:
        term.until("Longest queues")
        term.press(b"\x03")
        assert term.wait() == 130
        assert term.modes() == term.initial_modes
    assert "\x1b[?1049l" in term.written


def test_q_does_not_wait_for_a_response() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with on_terminal(port, "--timeout", "3600") as term:
            term.until(f"querying 127.0.0.1:{port}")
            with silent.accept()[0]:
                term.press(b"q")
                assert term.wait() == 0
        timed_out = genie_top(port, "--timeout", "0.2")
    assert timed_out.stderr == f"genie: 127.0.0.1:{port} did not respond within 0.2 s\n"


def test_it_restores_its_screen_after_being_stopped(admin: FakeAdmin) -> None:
    with on_terminal(admin.port, "--every", "3600") as term:
        term.until("Hot resources")
        keys = term.modes()
        assert keys != term.initial_modes
        term.set_modes(term.initial_modes)  # as a shell does when the process is stopped
        term.process.send_signal(signal.SIGCONT)
        term.until("Hot resources")
        assert term.modes() == keys
        assert term.written.count("\x1b[?1049h") == 2
        term.press(b"q")
        assert term.wait() == 0


def test_sigterm_restores_the_terminal(admin: FakeAdmin) -> None:
    with on_terminal(admin.port) as term:
        term.until("Longest queues")
        term.process.terminate()
        assert term.wait() == 143
        assert term.modes() == term.initial_modes


def test_errors_are_shown_until_the_next_response() -> None:
    port = free_port()
    with on_terminal(port, "--every", "0.1") as term:
        term.until(f"cannot connect to the admin port 127.0.0.1:{port}: ")
        with fake_admin(port) as admin:
            admin.status = 401
            admin.responses["/api/state"] = Problem(code="unauthorized", message="say \x1b[41mthe token")
            term.until("unauthorized: say \\x1b[41mthe token (no token was sent")
            set_state(admin, role="follower", leader="other:7077")
            text = term.screen("This server is not the leader (follower); other:7077 is: query its admin port.")
            assert "Longest queues" not in text
            set_state(admin, store_unavailable_since=NOW - 1000)
            term.until("The store is unavailable since")
            set_state(admin)
            term.until("Longest queues")
        term.until("Last response: ")
        term.press(b"q")
        assert term.wait() == 0


async def test_a_real_leader_its_deadlocks_and_its_follower(redis: Redis) -> None:
    with (
        running_server(redis, admin_port=free_port(), lease=600) as genie,
        running_server(redis, admin_port=free_port(), lease=600) as follower,
    ):
        admin, other = int(genie.settings["admin_port"]), int(follower.settings["admin_port"])
        idle = genie_top(admin)
        wire = await Wire.connect(genie.address)
        a = await wire.lock("exclusive:[bold]a", transactionName="D1", transactionTimeout=HOUR_MS)
        await wire.lock("exclusive:b", transactionName="D2", transactionTimeout=HOUR_MS)
        waiter = await wire.request("exclusive:b", transactionName="D1", queueTimeout=HOUR_MS)
        victim = await wire.request("exclusive:[bold]a", transactionName="D2")
        await wire.expect("released")
        with on_terminal(admin, "--every", "0.1") as term:
            screen = term.screen("Hot resources")
            term.press(b"q")
            assert term.wait() == 0
        ended, of_follower = (genie_cli("deadlocks", port) for port in (admin, other))
        follows = genie_top(other)
    assert (idle.returncode, idle.stderr) == (0, "")
    assert idle.stdout.endswith("\n\nNo requests wait.\n\nNo contention in the last minutes.\n")
    assert "locks 2  held 2  waiting 1 " in screen
    assert len(re.findall(rf"D1 +{waiter} ", screen)) == 1
    assert re.search(r"\nb +1 +\S+ m?s +D2 +\d+ ", screen), screen
    assert ended.stdout.splitlines()[1:] == [
        f"  {victim} of D2 was ended: it would have created a cycle",
        f"  {victim} of D2 waits for [bold]a",
        f"    which {a} of D1 holds",
        f"  {waiter} of D1 waits for b",
        f"    which {a + 1} of D2 holds",
    ]
    leads = f"the leader is 127.0.0.1:{genie.port}"
    assert of_follower.stderr == f"genie: unavailable: this server is not the leader; {leads}\n"
    assert follows.returncode == 0
    assert (
        f"This server is not the leader (follower); 127.0.0.1:{genie.port} is: query its admin port." in follows.stdout
    )


async def test_a_real_server_with_two_namespaces() -> None:
    with running_server(admin_port=free_port(), namespaces="orders,billing") as genie:
        port = int(genie.settings["admin_port"])
        wire = await Wire.connect(genie.address)
        wire.send("hello", namespace="billing")
        await wire.expect("welcome")
        await wire.lock("exclusive:a", transactionTimeout=HOUR_MS)
        first, second = genie_top(port), genie_top(port, "--namespace", "billing")
        billing = json.loads(genie_top(port, "--namespace", "billing", "--json").stdout)
        none = genie_cli("deadlocks", port, "--namespace", "stock")
    for shown, namespace, held in ((first, "orders", 0), (second, "billing", 1)):
        lines = shown.stdout.splitlines()
        assert f"  leader  namespace {namespace}  store memory  " in lines[0]
        assert lines[1] == "namespaces  orders leader  billing leader"
        assert lines[2].startswith(f"locks {held}  held {held} ")
    assert (billing["namespace"], billing["held"]) == ("billing", 1)
    message = "not-found: unknown namespace 'stock'; this server serves orders, billing"
    assert (none.returncode, none.stderr) == (1, f"genie: {message}\n")


def test_without_a_terminal_an_error_ends_it(admin: FakeAdmin) -> None:
    del admin.responses["/api/waits"]
    admin.status = 404
    failed = genie_top(admin.port)
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", "genie: not-found: no /api/waits\n")
    none = genie_top(free_port(), "--once")
    assert none.returncode == 1
    assert none.stderr.startswith("genie: cannot connect to the admin port ")
    assert genie_top(admin.port, "--every", "nan").returncode == 2
