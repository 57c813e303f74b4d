"""`genie status`, `inspect` and `release`, against a real server and against what is none."""

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

from fake import Fake, error, fake_server
from genie import LockLost, Unavailable, sync
from ports import free_port
from programs import run_genie, start_genie
from servers import WAIT_S, Genie, Redis, running_server

COMMANDS = (["status"], ["inspect"], ["explain", "7"], ["waits"], ["watch", "a"], ["release", "7"])

PATIENCES = ("0.5", "5", "60")


def genie_cli(port: int, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")} | variables
    return run_genie(*args, "--port", str(port), env=variables, timeout=WAIT_S)


def patiently(port: int, *args: str) -> subprocess.CompletedProcess[str]:
    """What comes of it when all its timeout is used up: as much as it takes to hear anything at all."""
    for timeout in PATIENCES:
        result = genie_cli(port, *args, "--timeout", timeout)
        if not is_silence(result.stderr):
            break
    return result


def is_silence(error: str) -> bool:
    """Whether it is complained of that nothing was heard, not of what was."""
    return ": no answer" in error or "did not respond within" in error


@contextmanager
def listening(greeting: bytes, *, then_close: bool = False) -> Iterator[tuple[int, threading.Event]]:
    """Something else on a port: says its greeting, and nothing more. The event: somebody asked it something."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []
        asked = threading.Event()

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connections.append(connection)
                with suppress(OSError):  # it has left already
                    connection.sendall(greeting)
                    if then_close:
                        connection.close()
                    elif connection.recv(1):
                        asked.set()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], asked
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def is_one_line(error: str) -> bool:
    return error.startswith("Error: ") and error.count("\n") == 1 and error.endswith("\n")


def test_status_of_a_server_that_is_there(genie: Genie) -> None:
    with sync.connect(*genie.address) as client:
        lock = client.acquire("status", transaction_timeout=3600)
        said = genie_cli(genie.port, "status")
        told = json.loads(genie_cli(genie.port, "status", "--json").stdout)
        lock.release()
    assert said.returncode == 0
    assert said.stdout.startswith(f"127.0.0.1:{genie.port} responded in ")
    assert said.stdout.endswith("requests held: 1, waiting: 0\n")
    assert (told["address"], told["held"], told["waiting"]) == (f"127.0.0.1:{genie.port}", 1, 0)
    assert told["roundTripMs"] > 0


@pytest.mark.parametrize("args", COMMANDS)
def test_nobody_is_there(args: list[str]) -> None:
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
def test_something_else_is_there(args: list[str], greeting: bytes) -> None:
    with listening(greeting, then_close=True) as (port, _):
        result = genie_cli(port, *args, "--timeout", "0.5")
    assert (result.returncode, result.stdout) == (1, "")
    assert is_one_line(result.stderr), result.stderr


@pytest.mark.parametrize("args", COMMANDS)
def test_somebody_is_there_and_never_answers(args: list[str]) -> None:
    with listening(b"") as (port, _):
        result = genie_cli(port, *args, "--timeout", "0.3")
    assert (result.returncode, result.stdout) == (1, "")
    assert is_one_line(result.stderr), result.stderr


@pytest.mark.parametrize("args", COMMANDS)
async def test_nobody_leads(args: list[str]) -> None:
    async with fake_server() as node:
        node.refusal = error("unavailable", "nobody leads")
        result = await asyncio.to_thread(patiently, node.port, *args)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"no server at 127.0.0.1:{node.port}: the server answered nobody leads" in result.stderr
    assert is_one_line(result.stderr)


async def test_a_server_that_can_not_release_says_why() -> None:
    for timeout in PATIENCES:
        async with fake_server() as node:
            refusing = asyncio.create_task(refuse_a_release(node))
            result = await asyncio.to_thread(genie_cli, node.port, "release", "7", "--timeout", timeout)
            refusing.cancel()
        if not is_silence(result.stderr):
            break
    assert (result.returncode, result.stdout) == (1, "")
    assert "the server answered no store" in result.stderr
    assert is_one_line(result.stderr)
    await refusing


async def refuse_a_release(node: Fake) -> None:
    line = await node.accept()
    await line.expect("release")
    node.refusal = error("unavailable", "no store")
    line.say(error("unavailable", "no store", id=7))


@pytest.mark.parametrize("args", COMMANDS)
def test_the_store_is_away(redis: Redis, args: list[str]) -> None:
    with running_server(redis, lease=600, store_timeout_ms=100) as genie:
        with sync.connect(*genie.address) as client:
            redis.send(signal.SIGSTOP)
            with suppress(Unavailable):
                while True:  # what is not stored is answered until the next commit is due
                    client.ping()
        result = patiently(genie.port, *args)
    assert (result.returncode, result.stdout) == (1, "")
    assert "the store is unavailable" in result.stderr
    assert is_one_line(result.stderr)


@pytest.mark.parametrize("args", [["inspect"], ["explain", "7"], ["waits"]])
async def test_a_server_of_another_kind_whose_answer_has_other_fields(args: list[str]) -> None:
    async with fake_server() as node:
        asking = asyncio.create_task(asyncio.to_thread(genie_cli, node.port, *args))
        line = await node.accept()
        await line.expect("inspect")
        line.say('{"command":"inspected","payload":{"holders":3}}')
        result = await asking
    assert (result.returncode, result.stdout) == (1, "")
    assert "the server may have another version" in result.stderr
    assert is_one_line(result.stderr), result.stderr


@pytest.mark.parametrize("args", COMMANDS)
def test_ctrl_c(args: list[str]) -> None:
    with listening(b"") as (port, asked):
        arguments = [*args, "--port", str(port), "--timeout", "1000"]
        process = start_genie(*arguments, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert asked.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=WAIT_S) == ("", "")
        assert process.returncode == 130


def test_inspect_shows_holders_and_who_blocks_whom(genie: Genie) -> None:
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
    assert f"└ {lock.id} of t1 holds exclusive:inspect/口 (" in shown.stdout
    assert f"{lock.id} of t1 holds exclusive:inspect/\\u53e3 (" in latin.stdout
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
        told = json.loads(genie_cli(genie.port, "inspect", "--limit", "2", "--json").stdout)
        all_ = json.loads(genie_cli(genie.port, "inspect", "--limit", "4", "--json").stdout)
        for lock in locks:
            lock.release()
        for thread in threads:
            thread.join()
    assert "Held: 4, 2 shown (see --limit)\n" in few.stdout
    assert "Waiting: 3, 2 shown (see --limit)\n" in few.stdout
    assert few.stdout.count("holds exclusive:limit/") == 2
    assert [len(told["holders"]), told["holdersTotal"], len(told["queue"]), told["queueTotal"]] == [2, 4, 2, 3]
    assert [len(all_["holders"]), len(all_["queue"])] == [4, 3]


@pytest.mark.parametrize(
    ("args", "says"),
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
        (["status", "--host", ","], "address is given"),
    ],
)
def test_bad_input_is_explained_in_one_line(genie: Genie, args: list[str], says: str) -> None:
    """The exit status is 1 where the server had to be asked, else 2."""
    result = genie_cli(genie.port, *args)
    asked = says.startswith(("there is no request", "request 5 does not exist", "no server"))
    assert (result.returncode, result.stdout) == (1 if asked else 2, "")
    assert says in result.stderr
    assert is_one_line(result.stderr)


def test_choices_exclude_each_other(genie: Genie) -> None:
    result = genie_cli(genie.port, "inspect", "--id", "3", "--resource", "a")
    assert result.returncode == 2
    assert "exclude each other" in result.stderr


def test_release_says_why_it_ended(genie: Genie) -> None:
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
