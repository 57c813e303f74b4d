"""`genie watch`, at a real server that restarts, and at a fake server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import orjson

from genie import sync
from support.network.fake_server import fake_server
from support.processes.programs import Forked, start_genie
from support.processes.servers import WAIT_S, Genie, running_server

LONG = {"transaction_timeout": 3_600.0}


@contextmanager
def watching(port: int, *args: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str] | Forked]:
    """Run `genie watch` with buffered output; kill it at the end, or after a timeout."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GENIE_") and name != "PYTHONUNBUFFERED"
    }
    with start_genie(
        *("watch", *args, "--port", str(port)),
        env=variables | {"PYTHONIOENCODING": "utf-8"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        timer = Timer(WAIT_S, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def line(process: subprocess.Popen[str] | Forked) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_held_locks_then_changes_until_ctrl_c(genie: Genie) -> None:
    with sync.connect(*genie.address) as client:
        held = client.acquire("shared:watch/a", transaction="t1", **LONG)
        with watching(genie.port, "watch/") as process:
            assert line(process) == f"locked    shared:watch/a  {held.id} of t1\n"
            other = client.acquire("elsewhere", **LONG)
            taken = client.acquire("watch/口", **LONG)
            assert line(process) == f"locked    exclusive:watch/口  {taken.id}\n"
            held.release()
            assert line(process) == f"unlocked  shared:watch/a  {held.id} of t1\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=WAIT_S) == ("", "")
            assert process.returncode == 130
        other.release()
        taken.release()


def test_json_prints_one_line_for_each_change(genie: Genie) -> None:
    with sync.connect(*genie.address) as client, watching(genie.port, "json/", "--json") as process:
        with client.lock("json/a", transaction="t1", **LONG) as lock:
            first = json.loads(line(process))
        second = json.loads(line(process))
    assert first == {
        "state": "locked",
        "resource": "json/a",
        "mode": "exclusive",
        "id": lock.id,
        "transactionName": "t1",
    }
    assert second == first | {"state": "unlocked"}


def test_it_exits_when_the_reader_of_its_pipe_has_exited(genie: Genie) -> None:
    with sync.connect(*genie.address) as client, client.lock("quiet", **LONG), watching(genie.port, "quiet") as process:
        assert line(process).startswith("locked ")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(WAIT_S) == 0


def test_it_exits_when_writing_to_a_closed_socket_fails(genie: Genie) -> None:
    ours, theirs = socket.socketpair()  # its end is noticed only by a write
    with sync.connect(*genie.address) as client, ours, theirs:
        held = client.acquire("unread", **LONG)
        with watching(genie.port, "unread", stdout=theirs.fileno()) as process, ours.makefile() as lines:
            theirs.close()
            assert lines.readline().startswith("locked ")
            ours.shutdown(socket.SHUT_RDWR)
            held.release()
            assert process.communicate(timeout=WAIT_S) == (None, "")
            assert process.returncode == 0


def test_after_a_lost_connection_the_difference_is_printed() -> None:
    with running_server() as genie, sync.connect(*genie.address) as client:
        client.acquire("lost/1", **LONG)
        with watching(genie.port, "lost/") as process:
            first = line(process)
            genie.kill()
            assert process.stderr is not None
            message = process.stderr.readline()
            genie.start()
            assert line(process) == first.replace("locked  ", "unlocked")
            with client.lock("lost/2", **LONG):
                assert line(process).startswith("locked    exclusive:lost/2 ")
            process.send_signal(signal.SIGINT)
            more = process.communicate(timeout=WAIT_S)[1]
    assert first.startswith("locked    exclusive:lost/1 ")
    assert message.startswith("genie: connection lost (")
    assert "hello" not in message + more  # failed attempts to reconnect are not reported as lost
    assert more == ""


async def test_a_truncated_list_of_held_locks_is_reported() -> None:
    async with fake_server() as node:
        with watching(node.port, "t/") as process:
            connection = await node.accept()
            assert await connection.expect("watch") == {"prefix": "t/"}
            held = {"prefix": "t/", "held": [{"resource": "t/1", "mode": "shared", "id": 7}], "truncated": True}
            connection.say(orjson.dumps({"command": "watching", "payload": held}).decode())
            assert await asyncio.to_thread(line, process) == "locked    shared:t/1  7\n"
            process.send_signal(signal.SIGINT)
            _, stderr = await asyncio.to_thread(process.communicate, timeout=WAIT_S)
    assert stderr == "genie: the server may not have listed all held locks: the output may be incomplete\n"
