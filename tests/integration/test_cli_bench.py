"""`genie bench` against real servers, and against other programs."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from genie import build, sync
from genie.protocol import messages
from support.processes.ports import free_port
from support.processes.programs import Forked, run_genie, start_genie
from support.processes.servers import WAIT_S, Genie, running_server

SLOTS = 4
FOREVER = ["--connections", str(SLOTS), "--warm-up", "0", "--seconds", "1000"]
HOT = re.compile(r"exclusive:genie-bench/[0-9a-f]+/hot/hot")
WELCOME = {"protocol": 1, "server": "genie/0", "namespace": "genie", "resumed": False}
SHORT = ["--connections", "5", "--depth", "3", "--warm-up", "0.05", "--seconds", "1"]


def bench(port: int, *args: str) -> subprocess.CompletedProcess[str]:
    return run_genie("bench", "--port", str(port), *args, env=os.environ, timeout=2 * WAIT_S)


@contextmanager
def running(port: int, *args: str) -> Iterator[subprocess.Popen[str] | Forked]:
    """Start `genie bench`; kill it at the end, or when it takes too long."""
    arguments = ["bench", "--port", str(port), *args]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_genie(*arguments, env=os.environ, text=True, **streams) as process:
        alarm = threading.Timer(2 * WAIT_S, process.kill)
        alarm.start()
        try:
            yield process
        finally:
            alarm.cancel()
            process.kill()


def header(genie: Genie, connections: int, in_flight: str) -> list[str]:
    """Return the first lines of the text output. The tests and the server are the same build."""
    first = f"127.0.0.1:{genie.port}, connections: {connections}, in flight on each: {in_flight}"
    return [first, f"server: {build.description()}", f"client: {build.description()}"]


def all_released(genie: Genie) -> bool:
    with sync.connect(*genie.address) as client:
        found = client.inspect()
    return not found.holders_total and not found.queue_total


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"


def wait_for_cycles(genie: Genie) -> None:
    """Wait until a slot has sent its second request, so that at least one cycle is completed."""
    ids: set[int] = set()
    with sync.connect(*genie.address) as client:

        def second_request_sent() -> bool:
            found = client.inspect()
            ids.update(row.id for row in (*found.holders, *found.queue))
            return len(ids) > SLOTS

        wait_until(second_request_sent)


def suspend(process: subprocess.Popen[Any] | Forked | None) -> None:
    """Send SIGSTOP, and wait until the process is stopped."""
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: " T " in stat.read_text())


def only_workload(stdout: str) -> dict[str, Any]:
    """Return the only result of a JSON document."""
    (row,) = json.loads(stdout)["workloads"]
    assert isinstance(row, dict)
    return row


def assert_consistent(row: dict[str, Any]) -> None:
    """Assert that the numbers of a workload without errors are consistent."""
    assert row["connections"] > 0
    assert row["errors"] == {}
    assert row["cycles"] > 0
    assert row["cycles_per_s"] == pytest.approx(row["cycles"] / row["measured_s"], rel=0.01, abs=0.05)
    assert row["client_cpu_percent"] > 0
    for times in (row["to_locked"], row["to_released"]):
        assert list(times) == ["p50_us", "p99_us", "p99_9_us", "max_us"]
        assert 0 < times["p50_us"] <= times["p99_us"] <= times["p99_9_us"] <= times["max_us"]
    assert all(row["to_locked"][name] <= row["to_released"][name] for name in row["to_locked"])


def test_all_workloads_as_json(genie: Genie) -> None:
    done = bench(genie.port, "--json", *SHORT, "--seconds", "0.5", "--keys", "2", "--shared", "50", "--resources", "4")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["address"] == f"127.0.0.1:{genie.port}"
    assert document["server"] == document["client"] == build.description()
    assert document["settings"] == {
        "connections": 5,
        "depth": 3,
        "measure_s": 0.5,
        "warm_up_s": 0.05,
        "keys": 2,
        "shared_percent": 50,
        "resources": 4,
    }
    assert document["interrupted"] is False
    assert [row["workload"] for row in document["workloads"]] == ["own", "hot", "mixed", "several"]
    for row in document["workloads"]:
        assert_consistent(row)
        assert row["connections"] == 5
        assert row["measured_s"] >= 0.5
    assert all_released(genie)


def test_selected_workloads_as_text(genie: Genie) -> None:
    done = bench(genie.port, "several", "own", "several", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == [
        *header(genie, 5, "3 requests"),
        "several: each request locks 3 keys of its own",
        "own: each request locks a key of its own",
    ]
    assert all_released(genie)


def test_two_benchmarks_use_different_keys(genie: Genie) -> None:
    with running(genie.port, "hot", *FOREVER) as one, running(genie.port, "hot", *FOREVER) as other:
        with sync.connect(*genie.address) as client:
            names: set[str] = set()

            def both_hold() -> bool:
                names.update(name for row in client.inspect().holders for name in row.resources)
                return len(names) > 1

            wait_until(both_hold)
        for process in (one, other):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=WAIT_S)
    assert all(HOT.fullmatch(name) for name in names)
    assert all_released(genie)


@pytest.mark.parametrize("workload", ["own", "hot"])
def test_ctrl_c_ends_early_with_the_results_so_far(genie: Genie, workload: str) -> None:
    with running(genie.port, workload, "several", "--json", *FOREVER) as process:
        wait_for_cycles(genie)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stderr) == (130, "")
    assert json.loads(stdout)["interrupted"] is True
    assert only_workload(stdout)["workload"] == workload
    assert_consistent(only_workload(stdout))
    assert all_released(genie)


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_during_the_warm_up_omits_the_workload(genie: Genie, as_json: bool) -> None:
    with running(genie.port, "hot", "--warm-up", "1000", *(["--json"] if as_json else [])) as process:
        wait_for_cycles(genie)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stderr) == (130, "")
    if as_json:
        assert (json.loads(stdout)["interrupted"], json.loads(stdout)["workloads"]) == (True, [])
    else:
        assert stdout.splitlines() == header(genie, 64, "1 request")
    assert all_released(genie)


def test_the_locks_of_a_killed_benchmark_are_released(genie: Genie) -> None:
    with running(genie.port, "hot", *FOREVER) as process, sync.connect(*genie.address) as client:
        wait_for_cycles(genie)
        suspend(process)
        wait_until(lambda: client.inspect().holders_total == 1)
        extend = messages.command("extend", id=client.inspect().holders[0].id, transactionTimeout=1_000_000)
        with socket.create_connection(genie.address) as other, other.makefile("rb") as lines:
            other.sendall(extend)  # so that it does not just time out
            assert b"extended" in lines.readline()
        process.kill()
        process.wait(WAIT_S)
        wait_until(lambda: all_released(genie))


def test_it_continues_without_rejected_connections() -> None:
    with running_server(max_connections=3) as genie:
        done = bench(genie.port, "own", "--json", *SHORT)
        shown = bench(genie.port, "own", *SHORT).stdout
    assert (done.returncode, done.stderr) == (1, "genie: errors occurred: own: too-many 2\n")
    row = only_workload(done.stdout)
    assert row["cycles"] > 0
    assert row["errors"] == {"too-many": 2}, "each rejected connection once"
    assert row["connections"] == 3
    assert " s), connections: 3 of 5, errors: too-many 2, " in shown


def test_another_client_releases_a_waiting_request(genie: Genie) -> None:
    with running(genie.port, "hot", "--json", *FOREVER) as process:
        wait_for_cycles(genie)
        with sync.connect(*genie.address) as client:
            wait_until(lambda: client.inspect().holders_total == 1)
            name = HOT.search(str(client.inspect()))
            assert name is not None
            with client.lock(name[0], priority=1, queue_timeout=WAIT_S, transaction_timeout=WAIT_S):
                wait_until(lambda: client.inspect().queue_total == SLOTS)
                cancelled = client.inspect().queue[0].id
                assert client.release(cancelled) == "success"
                wait_until(lambda: client.inspect().queue_total == SLOTS)
                assert client.inspect(id=cancelled).queue_total == 0
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert only_workload(stdout)["errors"] == {"released-by-other": 1}
    assert all_released(genie)


def test_a_killed_server_is_reported() -> None:
    with running_server() as genie, running(genie.port, "hot", "own", "--json", *FOREVER) as process:
        wait_for_cycles(genie)
        genie.kill()
        stdout, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert stderr.startswith(f"genie: lost all connections to 127.0.0.1:{genie.port}: ")
    assert stderr.count("\n") == 1
    row = only_workload(stdout)
    assert row["errors"] == {"connection-lost": SLOTS}
    assert row["connections"] == 0
    assert row["cycles"] > 0
    assert row["measured_s"] < 1000


def test_a_stopped_server_does_not_block_the_end() -> None:
    with running_server() as genie, running(genie.port, "hot", "--json", "--timeout", "2", *FOREVER) as process:
        wait_for_cycles(genie)
        suspend(genie.process)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130
        assert only_workload(stdout)["errors"]["not-released"] > 0
        genie.send(signal.SIGCONT)
        wait_until(lambda: all_released(genie))


def test_no_server_is_one_error() -> None:
    port, other = free_port(), free_port()
    done = bench(port, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"genie: no server at 127.0.0.1:{port}: ")
    both = bench(port, "--host", f"127.0.0.1,127.0.0.1:{other}")
    assert both.stderr.startswith(f"genie: no server at 127.0.0.1:{port}, 127.0.0.1:{other}: ")
    assert both.stderr.count("\n") == 1


def test_a_server_without_the_namespace_is_skipped_immediately(genie: Genie) -> None:
    with running_server(namespace="billing") as other:
        hosts = ("--host", f"127.0.0.1:{genie.port},127.0.0.1:{other.port}", "--namespace", "billing")
        done = bench(genie.port, "own", "--json", *SHORT, *hosts, "--timeout", "1000")
    assert (done.returncode, json.loads(done.stdout)["address"]) == (0, f"127.0.0.1:{other.port}")


def test_the_first_address_with_a_server_is_used(genie: Genie) -> None:
    done = bench(genie.port, "own", "--json", *SHORT, "--host", f"127.0.0.1:{free_port()},127.0.0.1")
    assert done.returncode == 0
    assert json.loads(done.stdout)["address"] == f"127.0.0.1:{genie.port}"


@contextmanager
def scripted_server(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listen on a port; call `talk` with every connection, in a thread."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=talk, args=server.accept()[:1], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def first_command(connection: socket.socket, lines: IO[bytes]) -> bytes:
    """Return the first command of a load connection; empty after a whole dialog with the client that looks up the leader."""
    first = lines.readline()
    if b"hello" not in first:
        return first
    connection.sendall(messages.command("welcome", **WELCOME, ref=ref_of(first)))
    for line in lines:
        if b"ping" in line:
            connection.sendall(messages.command("pong", ref=ref_of(line)))
        if b"bye" in line:
            connection.sendall(messages.command("bye", ref=ref_of(line)))
    return b""


def ref_of(line: bytes) -> str | None:
    """Return the `ref` of a command, which its reply repeats."""
    ref: str | None = json.loads(line)["payload"].get("ref")
    return ref


@pytest.mark.parametrize(
    ("answer", "errors"),
    [
        (b'{"command":"error","payload":{"code":"unavailable","message":""}}\n', {"unavailable", "not-released"}),
        (b"", {"not-released"}),
    ],
)
def test_no_completed_cycle_is_an_error(answer: bytes, errors: set[str]) -> None:
    def talk(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            if first_command(connection, lines):
                connection.sendall(answer)
                while lines.readline():
                    pass

    with scripted_server(talk) as port:
        done = bench(port, "own", "--json", "--timeout", "2", *SHORT, "--seconds", "0.2")
    assert done.returncode == 1
    assert "no cycle" in done.stderr
    assert done.stderr.count("\n") == 1
    row = only_workload(done.stdout)
    assert (row["cycles"], row["cycles_per_s"], row["to_locked"]["p50_us"]) == (0, 0, None)
    assert set(row["errors"]) == errors


def send_invalid_reply(connection: socket.socket) -> None:
    """Reply to a request with an invalid message."""
    with connection, connection.makefile("rb") as lines, suppress(OSError):
        if first_command(connection, lines):
            connection.sendall(b"hello\n")
            lines.readline()


def test_losing_all_connections_in_the_warm_up_is_an_error() -> None:
    with scripted_server(send_invalid_reply) as port:
        done = bench(port, "own", "--json", "--warm-up", "1000")
    assert done.returncode == 1
    assert "invalid message" in done.stderr
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["workloads"] == []


def test_an_invalid_message_is_counted_once_for_each_connection() -> None:
    with scripted_server(send_invalid_reply) as port:
        done = bench(port, "own", "--json", *FOREVER)
    assert done.returncode == 1
    assert "invalid message" in done.stderr
    assert only_workload(done.stdout)["errors"] == {"protocol-error": SLOTS}


@pytest.mark.parametrize("code", ["unavailable", "of-the-future"])
def test_a_counted_error_sets_the_exit_status(code: str) -> None:
    """The server rejects the first request of each connection, and grants all others."""

    def talk(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            if not first_command(connection, lines):
                return
            connection.sendall(messages.command("error", code=code, message="not now"))
            id_ = 0
            for line in lines:
                if b"release" in line.partition(b"payload")[0]:
                    connection.sendall(messages.command("released", id=id_, reason="success"))
                else:
                    id_ += 1
                    granted = messages.command("locked", id=id_, fence=id_)
                    connection.sendall(messages.command("queued", id=id_) + granted)

    with scripted_server(talk) as port:
        done = bench(port, "own", "--connections", "1", "--warm-up", "0", "--seconds", "1", "--json")
    assert (done.returncode, done.stderr) == (1, f"genie: errors occurred: own: {code} 1\n")
    assert only_workload(done.stdout)["errors"] == {code: 1}
    assert only_workload(done.stdout)["connections"] == 1
    assert only_workload(done.stdout)["cycles"] > 0


def test_an_unavailable_store_is_reported() -> None:
    why = "the store is unavailable, try again later"

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(messages.command("error", code="unavailable", message=why))
            connection.recv(1 << 16)

    with scripted_server(talk) as port:
        done = bench(port)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"genie: no serving leader at 127.0.0.1:{port}: the server answered: {why}\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_is_reported_in_one_line(genie: Genie, as_json: bool) -> None:
    with Path("/dev/full").open("w") as full:
        arguments = ["bench", "--port", str(genie.port), "own", *SHORT, *(["--json"] if as_json else [])]
        process = start_genie(*arguments, env=os.environ, text=True, stdout=full, stderr=subprocess.PIPE)
        _, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stderr) == (1, "genie: cannot write the result: No space left on device\n")


def test_a_cycle_completed_after_the_measured_time_is_not_counted() -> None:
    released_one = threading.Event()

    def talk(connection: socket.socket) -> None:
        """Grant the first of two requests; confirm its release only when the second is cancelled, after the measured time."""
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            if not first_command(connection, lines):
                return
            lines.readline()
            queued = messages.command("queued", id=1) + messages.command("queued", id=2)
            connection.sendall(queued + messages.command("locked", id=1, fence=1))
            assert lines.readline() == messages.command("release", id=1)
            released_one.set()
            assert lines.readline() == messages.command("release", id=2)
            for id_ in (1, 2):
                connection.sendall(messages.command("released", id=id_, reason="success"))
            assert not lines.readline(), "the connection is closed"

    with (
        scripted_server(talk) as port,
        running(port, "own", "--json", "--connections", "1", "--depth", "2", *FOREVER[2:]) as process,
    ):
        assert released_one.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stderr) == (130, "")
    assert (only_workload(stdout)["cycles"], only_workload(stdout)["errors"]) == (0, {})


def test_a_second_ctrl_c_does_not_wait_for_releases() -> None:
    requested, cancelled = threading.Event(), threading.Event()

    def talk(connection: socket.socket) -> None:
        """Never reply to the release that the first Ctrl-C sends."""
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            if not first_command(connection, lines):
                return
            connection.sendall(messages.command("queued", id=1))
            requested.set()
            assert lines.readline() == messages.command("release", id=1)
            cancelled.set()
            lines.readline()

    with (
        scripted_server(talk) as port,
        running(port, "own", "--json", "--timeout", "1000", "--connections", "1", *FOREVER[2:]) as process,
    ):
        assert requested.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        assert cancelled.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stderr) == (130, "")
    assert only_workload(stdout)["errors"] == {"not-released": 1}


def on_a_terminal(port: int, *args: str, also_stdout: bool) -> tuple[str, str]:
    """Return what was written to the terminal, and to stdout if that is a pipe."""
    leader, follower = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(leader, 1 << 16):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    stdout_to = follower if also_stdout else subprocess.PIPE
    arguments = ["bench", "--port", str(port), *args]
    process = start_genie(*arguments, env=os.environ, stdout=stdout_to, stderr=follower, text=True)
    os.close(follower)
    stdout, _ = process.communicate(timeout=WAIT_S)
    reader.join()
    os.close(leader)
    return b"".join(shown).decode(), stdout or ""


def test_progress_is_erased_before_a_result_is_printed(genie: Genie) -> None:
    written, _ = on_a_terminal(genie.port, "own", "hot", *SHORT, also_stdout=True)
    assert "own: warming up" in written
    screen = [line.rpartition("\r\x1b[K")[2] for line in written.split("\r\n")]
    assert [line for line in screen if not line.startswith("  ")] == [
        *header(genie, 5, "3 requests"),
        "own: each request locks a key of its own",
        "hot: all requests lock the same key",
        "",
    ]


def test_progress_is_shown_on_a_terminal_and_erased(genie: Genie) -> None:
    written, stdout = on_a_terminal(genie.port, "own", *SHORT, also_stdout=False)
    assert "\r\x1b[Kown: warming up\r" in written
    assert " s, " in written
    assert "cycles/s" in written
    assert written.endswith("\r\x1b[K")
    assert "\r" not in stdout


PROFILE = """
[[phase]]
name = "closed"
seconds = 0.4
connections = 4
resources = 4
locks = 3
one_by_one = true
[[phase]]
name = "open"
seconds = 0.4
connections = 2
rate = 100
priorities = 2
[[phase]]
name = "too late"
seconds = 0.4
connections = 2
resources = 1
hold_ms = 60000
queue_timeout_s = 0.05
"""


def test_a_profile_reports_each_phase_and_leaves_no_locks(genie: Genie, tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE)
    done = bench(genie.port, "--profile", str(path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    closed, arriving, late = json.loads(done.stdout)["phases"]
    assert closed["completed"] > 0
    assert closed["deadlocks"] > 0
    assert closed["to_locked"]["p50_us"] <= closed["to_locked"]["p99_us"]
    assert 0 < arriving["completed"] <= 100
    assert (late["completed"], late["unfinished"] > 0, late["timeouts"] > 0) == (0, True, True)
    assert [phase["errors"] for phase in (closed, arriving, late)] == [{}, {}, {}]
    assert all_released(genie)


def test_a_profile_states_the_whole_load(genie: Genie, tmp_path: Path) -> None:
    done = bench(genie.port, "--profile", "steady", "--connections", "3", "own")
    assert done.returncode == 2
    assert "--profile cannot be combined with the workload own, --connections" in done.stderr
    path = tmp_path / "profile.toml"
    path.write_text("[[phase]]\nrats = 3")
    done = bench(genie.port, "--profile", str(path))
    assert done.returncode == 2
    assert "phase 1: unknown key 'rats'" in done.stderr
