"""Processes that are forked from a process with a client, as by the servers of web applications."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from genie import sync
from support.processes.servers import WAIT_S, Genie

PRELUDE = """
import asyncio, os, signal, sys
import genie
from genie import sync

address = sys.argv[1], int(sys.argv[2])
"""

MADE_BEFORE_THE_FORK_FOR_THREADS = """
client = sync.connect(*address)
child_to_parent, parent_to_child = os.pipe(), os.pipe()
if os.fork() == 0:
    with client:
        lock = client.try_acquire("fork/job")
        os.write(child_to_parent[1], b"x")
        os.read(parent_to_child[0], 1)
        client.ping()
        print("child", lock.held, flush=True)
        lock.release()
    os._exit(0)
os.read(child_to_parent[0], 1)
with client:
    print("parent", client.try_acquire("fork/job"), flush=True)
    os.write(parent_to_child[1], b"x")
    os.wait()
"""

MADE_BEFORE_THE_FORK = """
client = genie.connect(*address)
child_to_parent, parent_to_child = os.pipe(), os.pipe()

async def child():
    async with client:
        lock = await client.try_acquire("fork/job")
        os.write(child_to_parent[1], b"x")
        os.read(parent_to_child[0], 1)
        await client.ping()
        print("child", lock.held, flush=True)
        await lock.release()

async def parent():
    async with client:
        print("parent", await client.try_acquire("fork/job"), flush=True)
        os.write(parent_to_child[1], b"x")

if os.fork() == 0:
    asyncio.run(child())
    os._exit(0)
os.read(child_to_parent[0], 1)
asyncio.run(parent())
os.wait()
"""

KILLED_FOR_THREADS = """
with sync.connect(*address, session_timeout=0.5) as client:
    lock = client.acquire("fork/killed", on_disconnect="release", transaction_timeout=3600)
    if os.fork() == 0:
        print(os.getpid(), lock.held, flush=True)
        signal.pause()
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED = """
async def main():
    async with genie.connect(*address, session_timeout=0.5) as client:
        lock = await client.acquire("fork/killed", on_disconnect="release", transaction_timeout=3600)
        if os.fork() == 0:
            print(os.getpid(), lock.held, flush=True)
            signal.pause()
        await asyncio.to_thread(sys.stdin.readline)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""

KILLED_AFTER_A_FORK_DURING_THE_CONNECT = """
child = 0

class Loop(asyncio.SelectorEventLoop):
    def create_connection(self, make_protocol, *args, **options):
        def fork_and_make_protocol():
            global child
            if not child:
                child = os.fork()
                if child == 0:
                    signal.pause()
            return make_protocol()

        return super().create_connection(fork_and_make_protocol, *args, **options)

async def main():
    async with genie.connect(*address, session_timeout=0.5) as client:
        await client.acquire("fork/killed", on_disconnect="release", transaction_timeout=3600)
        print(child, False, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        os.kill(os.getpid(), signal.SIGKILL)

with asyncio.Runner(loop_factory=Loop) as runner:
    runner.run(main())
"""

CONNECTING = """
import socket
servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]

async def main():
    async with genie.connect([f"127.0.0.1:{server.getsockname()[1]}" for server in servers], lazy=True):
        connections = [(await asyncio.to_thread(server.accept))[0] for server in servers]
        await asyncio.sleep(0.2)
        global child
        child = os.fork()
        if child == 0:
            signal.pause()
    for connection in connections:
        connection.settimeout(10)
        while connection.recv(1000):
            pass
    print("ended", flush=True)

try:
    asyncio.run(main())
finally:
    os.kill(child, signal.SIGKILL)
"""

OPEN_IN_A_CHILD = """
async def main():
    client = genie.connect(*address)
    async with client:
        lock = await client.acquire("fork/open")
        child = os.fork()
        if child == 0:
            print(lock.held)
            for call in (lock.release, client.ping, client.__aenter__):
                try:
                    await call()
                except RuntimeError as error:
                    print(error)
            sys.stdout.flush()
            await client.close()
            os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lock.held)
        await client.ping()
        await lock.release()

asyncio.run(main())
"""


def start(genie: Genie, program: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + program, *map(str, genie.address)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "program", [MADE_BEFORE_THE_FORK_FOR_THREADS, MADE_BEFORE_THE_FORK], ids=["threads", "asyncio"]
)
def test_two_processes_that_open_copies_of_a_client_do_not_hold_one_lock(genie: Genie, program: str) -> None:
    """With the same session secret and `ref`, the server answered the second process with the lock of the first."""
    output, errors = start(genie, program).communicate(timeout=WAIT_S)
    assert (errors, output.splitlines()) == ("", ["parent None", "child True"])


@pytest.mark.parametrize(
    "program",
    [KILLED_FOR_THREADS, KILLED, KILLED_AFTER_A_FORK_DURING_THE_CONNECT],
    ids=["threads", "asyncio", "connecting"],
)
def test_the_end_of_a_process_ends_its_session_although_its_child_runs(genie: Genie, program: str) -> None:
    """The child inherits the socket: while it was open there, the server saw no end of the connection."""
    process = start(genie, program)
    child, held = process.stdout.readline().split()
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        with sync.connect(*genie.address) as other:
            other.acquire("fork/killed", queue_timeout=20).release()
    finally:
        os.kill(int(child), signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    assert held == "False"


def test_the_attempts_to_connect_end_although_a_child_runs(genie: Genie) -> None:
    """The second attempt waits until the first one, whose `hello` has no answer, has ended."""
    output, errors = start(genie, CONNECTING).communicate(timeout=WAIT_S)
    assert (errors, output) == ("", "ended\n")


def test_a_client_that_is_open_belongs_to_the_parent(genie: Genie) -> None:
    output, errors = start(genie, OPEN_IN_A_CHILD).communicate(timeout=WAIT_S)
    error = "the client was opened before this process was forked: open a new one in this process"
    assert (errors, output.splitlines()) == ("", ["False", *[error] * 3, "3 True"])
