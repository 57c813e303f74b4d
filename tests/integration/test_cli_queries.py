"""The commands that query a server, at real servers, at other programs, and without a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from genie import LockLost, Unavailable, build, sync
from support.network.fake_server import Fake, error, fake_server
from support.processes.ports import free_port
from support.processes.programs import run_genie, start_genie
from support.processes.servers import WAIT_S, Genie, Redis, running_server

COMMANDS = (["status"], ["inspect"], ["explain", "7"], ["waits"], ["watch", "a"], ["release", "7"])

TIMEOUTS = ("0.5", "5", "60")


def genie_cli(port: int, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")} | variables
    return run_genie(*args, "--port", str(port), env=variables, timeout=WAIT_S)


def with_longer_timeouts(port: int, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command that uses up its timeout; repeat with a longer one until the server had time to reply."""
    for timeout in TIMEOUTS:
        result = genie_cli(port, *args, "--timeout", timeout)
        if not is_timeout(result.stderr):
            break
    return result


def is_timeout(error: str) -> bool:
    """Return whether an error reports that there was no reply, rather than what the reply was."""
    return ": no answer" in error or "did not respond within" in error


@contextmanager
def listening(greeting: bytes, *, then_close: bool = False) -> Iterator[tuple[int, threading.Event]]:
    """Listen on a port; send a greeting to each connection, then nothing. The event: data was received."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []
        received = threading.Event()

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connections.append(connection)
                with suppress(OSError):  # the client has disconnected already
                    connection.sendall(greeting)
                    if then_close:
                        connection.close()
                    elif connection.recv(1):
                        received.set()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], received
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def is_one_line(error: str) -> bool:
    return error.startswith("genie: ") and error.count("\n") == 1 and error.endswith("\n")


def test_status_of_a_server(genie: Genie) -> None:
    with sync.connect(*genie.address) as client:
        lock = client.acquire("status", transaction_timeout=3600)
        text = genie_cli(genie.port, "status")
        document = json.loads(genie_cli(genie.port, "status", "--json").stdout)
        lock.release()
    assert text.returncode == 0
    assert text.stdout.startswith(f"127.0.0.1:{genie.port} leads, and responded in ")
    assert text.stdout.endswith(f"requests held: 1, waiting: 0\n{build.description()}\n")
    assert (document["address"], document["held"], document["waiting"]) == (f"127.0.0.1:{genie.port}", 1, 0)
    assert document["roundTripMs"] > 0
    assert document["server"] == build.description()


@pytest.mark.parametrize("args", COMMANDS)
def test_no_server_is_one_error(args: list[str]) -> None:
    port = free_port()
    result = genie_cli(port, *args)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"no server at 127.0.0.1:{port}" in result.stderr
    assert is_one_line(result.stderr)


@pytest.mark.parametrize("args", COMMANDS)
@pytest.mark.parametrize(
    "greeting",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
        b"\xff\xfe\x00\n",
        b'{"command":"inspected","payload":{}}\n',
        b'{"command":"error","payload":{"code":"too-many","message":"full"}}\n',
        b"",
    ],
)
def test_another_program_on_the_port_is_one_error(args: list[str], greeting: bytes) -> None:
    with listening(greeting, then_close=True) as (port, _):
        result = genie_cli(port, *args, "--timeout", "0.5")
    assert (result.returncode, result.stdout) == (1, "")
    assert is_one_line(result.stderr), result.stderr


@pytest.mark.parametrize("args", COMMANDS)
def test_a_program_that_does_not_reply_is_one_error(args: list[str]) -> None:
    with listening(b"") as (port, _):
        result = genie_cli(port, *args, "--timeout", "0.3")
    assert (result.returncode, result.stdout) == (1, "")
    assert is_one_line(result.stderr), result.stderr


@pytest.mark.parametrize("args", COMMANDS)
async def test_no_leader_is_one_error(args: list[str]) -> None:
    async with fake_server() as node:
        node.refusal = error("unavailable", "no leader is known")
        result = await asyncio.to_thread(with_longer_timeouts, node.port, *args)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"no serving leader at 127.0.0.1:{node.port}: the server answered: no leader is known" in result.stderr
    assert is_one_line(result.stderr)


async def test_a_rejected_release_names_the_reason() -> None:
    for timeout in TIMEOUTS:
        async with fake_server() as node:
            rejecting = asyncio.create_task(reject_release(node))
            result = await asyncio.to_thread(genie_cli, node.port, "release", "7", "--timeout", timeout)
            rejecting.cancel()
        if not is_timeout(result.stderr):
            break
    assert (result.returncode, result.stdout) == (1, "")
    assert "the server answered: no store" in result.stderr
    assert is_one_line(result.stderr)
    await rejecting


async def reject_release(node: Fake) -> None:
    line = await node.accept()
    await line.expect("release")
    node.refusal = error("unavailable", "no store")
    line.say(error("unavailable", "no store", id=7))


@pytest.mark.parametrize("args", COMMANDS)
def test_an_unavailable_store_is_one_error(redis: Redis, args: list[str]) -> None:
    with running_server(redis, lease=600, store_timeout_ms=100) as genie:
        with sync.connect(*genie.address) as client:
            redis.send(signal.SIGSTOP)
            with suppress(Unavailable):
                while True:  # a ping needs no commit: it is answered until the next commit fails
                    client.ping()
        result = with_longer_timeouts(genie.port, *args)
    assert (result.returncode, result.stdout) == (1, "")
    assert "the store is unavailable" in result.stderr
    assert is_one_line(result.stderr)


@pytest.mark.parametrize("args", [["inspect"], ["explain", "7"], ["waits"]])
async def test_a_reply_with_unexpected_fields_is_one_error(args: list[str]) -> None:
    async with fake_server() as node:
        query = asyncio.create_task(asyncio.to_thread(genie_cli, node.port, *args))
        line = await node.accept()
        await line.expect("inspect")
        line.say('{"command":"inspected","payload":{"holders":3}}')
        result = await query
    assert (result.returncode, result.stdout) == (1, "")
    assert "the server may have another version" in result.stderr
    assert is_one_line(result.stderr), result.stderr


@pytest.mark.parametrize("args", COMMANDS)
def test_ctrl_c_ends_without_a_message(args: list[str]) -> None:
    with listening(b"") as (port, received):
        arguments = [*args, "--port", str(port), "--timeout", "1000"]
        process = start_genie(*arguments, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert received.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=WAIT_S) == ("", "")
        assert process.returncode == 130


def test_inspect_shows_holders_and_blockers(genie: Genie) -> None:
    with sync.connect(*genie.address) as client:
        lock = client.acquire("inspect/口", "shared:inspect/b", transaction="t1", transaction_timeout=3600)
        waiting = threading.Thread(target=lambda: client.acquire("inspect/口", queue_timeout=3600).release())
        waiting.start()
        while not client.inspect(resource="inspect/口").queue_total:
            pass
        shown = genie_cli(genie.port, "inspect", "--resource", "inspect/口", PYTHONIOENCODING="utf-8")
        latin = genie_cli(genie.port, "inspect", "--resource", "exclusive:inspect/口", PYTHONIOENCODING="latin-1")
        by_transaction = genie_cli(genie.port, "inspect", "--transaction", "t1", "--json")
        by_id = genie_cli(genie.port, "inspect", "--id", str(lock.id), "--json", "--limit", "1")
        lock.release()
        waiting.join()
    assert (shown.returncode, latin.returncode) == (0, 0)
    assert f"  {lock.id}  t1 " in shown.stdout
    assert "Waiting: 1\n" in shown.stdout
    assert f"└ {lock.id} of t1 holds exclusive:inspect/口, " in shown.stdout
    assert f"{lock.id} of t1 holds exclusive:inspect/\\u53e3, " in latin.stdout
    assert json.loads(by_transaction.stdout)["holders"][0]["id"] == lock.id
    assert json.loads(by_id.stdout)["holders"][0]["fence"] == lock.fence
    assert json.loads(by_id.stdout)["queue"] == []


def test_the_limit_of_inspect_counts_holders_and_waiters_separately(genie: Genie) -> None:
    with sync.connect(*genie.address) as client:
        locks = [client.acquire(f"limit/{n}", transaction="limit", transaction_timeout=3600) for n in range(4)]
        threads = [
            threading.Thread(target=lambda n=n: client.acquire(f"limit/{n}", queue_timeout=3600).release())
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        while client.inspect(limit=1).queue_total < 3:
            pass
        few = genie_cli(genie.port, "inspect", "--limit", "2")
        two = json.loads(genie_cli(genie.port, "inspect", "--limit", "2", "--json").stdout)
        all_ = json.loads(genie_cli(genie.port, "inspect", "--limit", "4", "--json").stdout)
        for lock in locks:
            lock.release()
        for thread in threads:
            thread.join()
    assert "Held: 4, 2 shown (see --limit)\n" in few.stdout
    assert "Waiting: 3, 2 shown (see --limit)\n" in few.stdout
    assert few.stdout.count("holds exclusive:limit/") == 2
    assert [len(two["holders"]), two["holdersTotal"], len(two["queue"]), two["queueTotal"]] == [2, 4, 2, 3]
    assert [len(all_["holders"]), len(all_["queue"])] == [4, 3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "--resource", ""], "1 to 512 characters"),
        (["inspect", "--resource", "a\nb"], "control characters"),
        (["inspect", "--transaction", "t" * 513], "1 to 512 characters"),
        (["inspect", "--id", str(1 << 60)], "below 2^53"),
        (["explain", str(1 << 60)], "below 2^53"),
        (["explain", "5"], "request 5 does not exist"),
        (["explain", "5", "--json"], "request 5 does not exist"),
        (["waits", "--resource", ""], "1 to 512 characters"),
        (["watch", "a\nb"], "control characters"),
        (["watch", "p" * 513], "512 characters"),
        (["release", str(1 << 60)], "below 2^53"),
        (["release", "5"], "there is no request 5"),
        (["status", "--host", "no such host"], "no server at no such host"),
        (["status", "--host", "127.0.0.1:http"], "a port is a number"),
        (["status", "--host", ","], "at least one server address"),
    ],
)
def test_invalid_input_is_one_error(genie: Genie, args: list[str], message: str) -> None:
    """The exit status is 1 if the server found the error, else 2."""
    result = genie_cli(genie.port, *args)
    from_server = message.startswith(("there is no request", "request 5 does not exist", "no server"))
    assert (result.returncode, result.stdout) == (1 if from_server else 2, "")
    assert message in result.stderr
    assert is_one_line(result.stderr)


def test_inspect_filters_exclude_each_other(genie: Genie) -> None:
    result = genie_cli(genie.port, "inspect", "--id", "3", "--resource", "a")
    assert result.returncode == 2
    assert "are mutually exclusive" in result.stderr


def test_release_prints_the_reason_of_the_end(genie: Genie) -> None:
    with sync.connect(*genie.address) as client:
        lock = client.acquire("release", transaction_timeout=3600)
        first = genie_cli(genie.port, "release", str(lock.id))
        again = genie_cli(genie.port, "release", str(lock.id), "--json")
        with pytest.raises(LockLost) as late, client.lock("release", transaction_timeout=0.001) as lock_:
            assert lock_.lost.wait(WAIT_S)
        lost = genie_cli(genie.port, "release", str(late.value.id))
    assert (first.returncode, first.stdout) == (0, f"{lock.id} is released: success\n")
    assert json.loads(again.stdout) == {"id": lock.id, "reason": "success"}
    assert (lost.returncode, lost.stdout) == (0, f"{late.value.id} is released: transaction-timeout\n")
