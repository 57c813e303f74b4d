"""`genie top`, on a terminal and without one: at an admin port that the test speaks for."""

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

from admin import SpokenAdmin, spoken_admin
from admin_observations import HOT, WAITS, state
from genie.admin.models import Problem
from ports import free_port
from programs import run_genie
from servers import WAIT_S, Redis, running_server
from terminal import Terminal, terminal
from wire import Wire

HOUR_MS = 3_600_000


def environment() -> dict[str, str]:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("GENIE_") and name not in SIZE_AND_LOOK
    }
    return clean | {"PYTHONIOENCODING": "utf-8", "TERM": "xterm"}


SIZE_AND_LOOK = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def command(name: str, port: int, *args: str) -> list[str]:
    return [sys.executable, "-m", "genie.cli", name, *args, "--admin-port", str(port)]


def genie_top(port: int, *args: str) -> subprocess.CompletedProcess[str]:
    return genie_cli("top", port, *args)


def genie_cli(name: str, port: int, *args: str) -> subprocess.CompletedProcess[str]:
    return run_genie(name, *args, "--admin-port", str(port), env=environment(), timeout=WAIT_S)


def on_terminal(port: int, *args: str, columns: int = 100, rows: int = 30) -> AbstractContextManager[Terminal]:
    return terminal(command("top", port, *args), environment(), columns, rows)


def tell(admin: SpokenAdmin, **more: object) -> None:
    admin.answers |= {"/api/state": state(**more), "/api/waits": WAITS, "/api/hot": HOT}


@pytest.fixture
def admin() -> Iterator[SpokenAdmin]:
    with spoken_admin() as server:
        tell(server)
        yield server


def test_one_picture_where_there_is_no_terminal(admin: SpokenAdmin) -> None:
    shown = genie_top(admin.port)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("genie 0.1.0  leader  namespace genie ")
    assert "[red]x\\x1b[31m" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "q: quit" not in shown.stdout


def test_once_on_a_terminal_is_one_picture_of_its_width(admin: SpokenAdmin) -> None:
    with on_terminal(admin.port, "--once", columns=60) as term:
        assert term.ended() == 0
        lines = term.written.splitlines()
    assert lines[0].startswith("genie 0.1.0")
    assert "\x1b" not in term.written
    assert max(map(len, lines)) <= 60


def test_programs_get_the_state(admin: SpokenAdmin) -> None:
    told = genie_top(admin.port, "--json", "--once").stdout
    assert json.loads(told) == json.loads(msgspec.json.encode(state()))


def test_looks_anew_until_q(admin: SpokenAdmin) -> None:
    with on_terminal(admin.port, "--every", "0.1") as term:
        assert "grants 1,200/s" in term.until("Hot resources")
        assert "accounts/1[red]x\\x1b[31m" in term.written
        assert "\x1b[31m" not in term.written
        tell(admin, held=4_711)
        term.until("held 4,711")
        term.resize(columns=50, rows=12)
        narrow = term.picture("Longest queues (2 of 20)")
        assert "held 4,711" in narrow
        assert "HOLDER" in narrow
        assert "HELD FOR" not in narrow
        assert "Hot" not in narrow
        term.press(b"xQ")
        assert term.ended() == 0
        assert term.modes() == term.before
    assert term.written.endswith("\x1b[?25h\x1b[?1049l")  # the cursor is shown again, and so is what was there before


def test_ctrl_c(admin: SpokenAdmin) -> None:
    with on_terminal(admin.port) as term:
        term.until("Longest queues")
        term.press(b"\x03")
        assert term.ended() == 130
        assert term.modes() == term.before
    assert "\x1b[?1049l" in term.written


def test_q_does_not_wait_for_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with on_terminal(port, "--timeout", "3600") as term:
            term.until(f"querying 127.0.0.1:{port}")
            with silent.accept()[0]:
                term.press(b"q")
                assert term.ended() == 0
        said = genie_top(port, "--timeout", "0.2")
    assert said.stderr == f"Error: 127.0.0.1:{port} did not respond within 0.2 s\n"


def test_takes_the_terminal_again_after_a_stop(admin: SpokenAdmin) -> None:
    with on_terminal(admin.port, "--every", "3600") as term:
        term.until("Hot resources")
        keys = term.modes()
        assert keys != term.before
        term.set_modes(term.before)  # as a shell does
        term.process.send_signal(signal.SIGCONT)
        term.until("Hot resources")
        assert term.modes() == keys
        assert term.written.count("\x1b[?1049h") == 2
        term.press(b"q")
        assert term.ended() == 0


def test_sigterm_gives_the_terminal_back(admin: SpokenAdmin) -> None:
    with on_terminal(admin.port) as term:
        term.until("Longest queues")
        term.process.terminate()
        assert term.ended() == 143
        assert term.modes() == term.before


def test_says_what_is_wrong_and_goes_on_when_it_is_not() -> None:
    port = free_port()
    with on_terminal(port, "--every", "0.1") as term:
        term.until(f"cannot connect to the admin port 127.0.0.1:{port}: ")
        with spoken_admin(port) as admin:
            admin.status = 401
            admin.answers["/api/state"] = Problem(code="unauthorized", message="say \x1b[41mthe token")
            term.until("unauthorized: say \\x1b[41mthe token (no token was sent")
            tell(admin, role="follower", leader="other:7077")
            text = term.picture("This server is not the leader (follower); other:7077 is: query its admin port.")
            assert "Longest queues" not in text
            tell(admin, store_available=False)
            term.until("The store is unavailable.")
            tell(admin)
            term.until("Longest queues")
        term.until("Last response: ")
        term.press(b"q")
        assert term.ended() == 0


async def test_a_real_server_its_deadlocks_and_one_that_follows(redis: Redis) -> None:
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
            picture = term.picture("Hot resources")
            term.press(b"q")
            assert term.ended() == 0
        ended, of_follower = (genie_cli("deadlocks", port) for port in (admin, other))
        follows = genie_top(other)
    assert (idle.returncode, idle.stderr) == (0, "")
    assert idle.stdout.endswith("\n\nNo requests wait.\n\nNo contention in the last minutes.\n")
    assert "locks 2  held 2  waiting 1 " in picture
    assert len(re.findall(rf"D1 +{waiter} ", picture)) == 1
    assert re.search(r"\nb +1 +\S+ m?s +D2 +\d+ ", picture), picture
    assert ended.stdout.splitlines()[1:] == [
        f"  {victim} of D2 was ended: it would have created a cycle",
        f"  {victim} of D2 waits for [bold]a",
        f"    which {a} of D1 holds",
        f"  {waiter} of D1 waits for b",
        f"    which {a + 1} of D2 holds",
    ]
    leads = f"the leader is 127.0.0.1:{genie.port}"
    assert of_follower.stderr == f"Error: unavailable: this server is not the leader; {leads}\n"
    assert follows.returncode == 0
    assert (
        f"This server is not the leader (follower); 127.0.0.1:{genie.port} is: query its admin port." in follows.stdout
    )


async def test_a_real_server_of_two_namespaces() -> None:
    with running_server(admin_port=free_port(), namespaces="orders,billing") as genie:
        port = int(genie.settings["admin_port"])
        wire = await Wire.connect(genie.address)
        wire.send("hello", namespace="billing")
        await wire.expect("welcome")
        await wire.lock("exclusive:a", transactionTimeout=HOUR_MS)
        first, second = genie_top(port), genie_top(port, "--namespace", "billing")
        told = json.loads(genie_top(port, "--namespace", "billing", "--json").stdout)
        none = genie_cli("deadlocks", port, "--namespace", "stock")
    for shown, namespace, held in ((first, "orders", 0), (second, "billing", 1)):
        lines = shown.stdout.splitlines()
        assert f"  leader  namespace {namespace}  store memory  " in lines[0]
        assert lines[1] == "namespaces  orders leader  billing leader"
        assert lines[2].startswith(f"locks {held}  held {held} ")
    assert (told["namespace"], told["held"]) == ("billing", 1)
    said = "not-found: unknown namespace 'stock'; this server serves orders, billing"
    assert (none.returncode, none.stderr) == (1, f"Error: {said}\n")


def test_without_a_terminal_what_is_wrong_ends_it(admin: SpokenAdmin) -> None:
    del admin.answers["/api/waits"]
    admin.status = 404
    said = genie_top(admin.port)
    assert (said.returncode, said.stdout, said.stderr) == (1, "", "Error: not-found: no /api/waits\n")
    none = genie_top(free_port(), "--once")
    assert none.returncode == 1
    assert none.stderr.startswith("Error: cannot connect to the admin port ")
    assert genie_top(admin.port, "--every", "nan").returncode == 2
