"""The client for threads with a real server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from genie import ConnectionLost, Deadlock, LockLost, QueueTimeout, RequestRejected, TransactionTimeout, sync
from genie.client import clock
from genie.client.commands import make_request
from genie.client.sync import Lock
from genie.client.sync_connection import SyncConnection
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie


@pytest.fixture
def client(genie: Genie):
    with sync.connect(*genie.address) as client:
        yield client


@pytest.fixture
def other(genie: Genie):
    with sync.connect(*genie.address) as client:
        yield client


def until_waiting(client: sync.Client, name: str) -> int:
    while True:
        found = client.inspect(resource=name)
        if found.queue_total:
            return found.queue[0].id


def until_free(client: sync.Client, name: str) -> None:
    while True:
        found = client.inspect(resource=name)
        if found.queue_total == found.holders_total == 0:
            return


def shorten(lock: Lock) -> None:
    """Let a lock time out while its block runs, which a short timeout from the start can't be relied upon to do."""
    with suppress(LockLost):
        lock.extend(0.001)


def test_the_reply_to_a_release_may_arrive_before_its_thread_waits(client, monkeypatch):
    """The background thread runs whenever it likes, also between the sending of a release and the wait for its answer."""
    submit = SyncConnection._submit

    def submit_and_wait(connection, function, *arguments):
        submit(connection, function, *arguments)
        end = time.monotonic() + WAIT_S
        while not arguments[-1].done() and time.monotonic() < end:
            time.sleep(0)

    monkeypatch.setattr(SyncConnection, "_submit", submit_and_wait)
    client.acquire("sync/late").release()
    id_ = client.acquire("sync/late").id
    client.release(id_)
    until_free(client, "sync/late")


def test_a_lock_is_held_in_the_block_and_released_after_it(client, other):
    with client.lock("sync/a", "shared:sync/b", transaction="t-sync", priority=3) as lock:
        [held] = other.inspect(id=lock.id).holders
        assert (held.transaction, held.priority, held.fence) == ("t-sync", 3, lock.fence)
        assert lock.resources == ("exclusive:sync/a", "shared:sync/b")
        assert other.try_acquire("sync/a") is None
    with other.lock("sync/a", queue_timeout=0) as again:
        assert again.fence > lock.fence
    assert not lock.lost.is_set()


def test_one_connection_serves_many_threads(client):
    inside = 0

    def work(_: int) -> None:
        nonlocal inside
        with client.lock("sync/apart", queue_timeout=WAIT_S):
            inside += 1
            assert inside == 1
            client.ping()
            inside -= 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(200)))


def test_a_queue_timeout_has_the_blockers(client, other):
    with client.lock("sync/late", transaction="holder") as lock, pytest.raises(QueueTimeout) as caught:
        other.acquire("sync/late", queue_timeout=0.001)
    assert caught.value.blockers[0].id == lock.id


def test_a_deadlock_is_raised(client):
    with (
        client.lock("sync/d1", transaction="s1"),
        client.lock("sync/d2", transaction="s2"),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(client.acquire, "sync/d2", transaction="s1")
        id_ = until_waiting(client, "sync/d2")
        with pytest.raises(Deadlock):
            client.acquire("sync/d1", transaction="s2")
        with pytest.raises(Deadlock):
            client.try_acquire("sync/d1", transaction="s2")
        assert client.release(id_) == "success"
        assert waiting.exception(WAIT_S) is not None


def test_the_end_of_the_block_of_a_lost_lock_raises_lock_lost(client):
    with pytest.raises(TransactionTimeout), client.lock("sync/lost") as lock:
        shorten(lock)
        assert lock.lost.wait(WAIT_S)
    lock.release()
    with pytest.raises(TransactionTimeout):
        lock.extend(1)


def test_an_error_of_the_block_is_propagated_even_if_the_lock_is_lost(client, other):
    with pytest.raises(KeyError) as caught, client.lock("sync/error") as lock:
        other.release(lock.id)
        assert lock.lost.wait(WAIT_S)
        raise KeyError
    assert "was released by its id" in caught.value.__notes__[0]
    with pytest.raises(KeyError), client.lock("sync/error"):
        raise KeyError
    with other.lock("sync/error", queue_timeout=0):
        pass


def test_a_watchdog_extends_the_lock_while_the_block_runs(client):
    with client.lock("sync/watchdog", transaction_timeout=30, watchdog=True) as lock:
        link, request = client._connection, lock._request
        first = request.expires_at
        assert first - request.renew_at == pytest.approx(20), "when a third of it has passed"
        link._execute_and_wait(
            lambda: (link.aio.session.requests.live.renew_all(clock.now()), link.aio.flush())
        )  # that is now
        while request.expires_at == first:
            assert not lock.lost.is_set()
            client.ping()
        assert not lock.lost.is_set()
    until_free(client, "sync/watchdog")


def test_extend_and_release_twice(client):
    lock = client.acquire("sync/extend")
    lock.extend(60)
    assert client.inspect(id=lock.id).holders[0].expires_in > 20
    shorten(lock)
    assert lock.lost.wait(WAIT_S)
    lock = client.acquire("sync/extend")
    lock.release()
    lock.release()
    with pytest.raises(LockLost, match="was released"):
        lock.extend(1)


def test_release_by_id(client, other):
    lock = client.acquire("sync/by-id")
    assert other.release(lock.id) == "success"
    assert lock.lost.wait(WAIT_S)
    with pytest.raises(RequestRejected, match="unknown-id"):
        other.release(5)


def test_ctrl_c_in_a_waiting_acquire_cancels_its_request(client, other):
    main = threading.get_ident()
    lock = other.acquire("sync/ctrl-c")

    def interrupt() -> None:
        until_waiting(other, "sync/ctrl-c")
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.acquire("sync/ctrl-c", queue_timeout=WAIT_S)
    thread.join()
    client.ping()
    assert other.inspect(resource="sync/ctrl-c").queue_total == 0
    lock.release()


def test_ctrl_c_before_the_id_is_known_releases_the_request(genie, other):
    name = "sync/early"
    with sync.connect(*genie.address) as client:
        link = client._connection
        request = make_request(link.new_ref(), [name])
        session = link.aio.session
        link._execute_and_wait(
            lambda: (session.requests.send(request, 0.0), session.abandon(request, 0.0), link.aio.flush())
        )
    assert other.try_acquire(name) is not None
    assert request.state.name == "ENDED"


def test_ctrl_c_before_the_background_thread_is_woken_sends_nothing(genie, other, monkeypatch):
    with sync.connect(*genie.address) as client:
        client.ping()
        connection = client._connection
        wake = connection._loop.call_soon_threadsafe

        def interrupted(*_: object) -> None:
            monkeypatch.setattr(connection._loop, "call_soon_threadsafe", wake)
            raise KeyboardInterrupt

        monkeypatch.setattr(connection._loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.acquire("sync/unsent")
        client.ping()  # executes what is still queued
        assert other.try_acquire("sync/unsent") is not None


def test_close_fails_waiting_calls(genie, other):
    with other.lock("sync/closing"), ThreadPoolExecutor(1) as pool:
        with sync.connect(*genie.address) as client:
            waiting = pool.submit(client.acquire, "sync/closing", queue_timeout=WAIT_S)
            until_waiting(other, "sync/closing")
        assert "the client was closed" in str(waiting.exception(WAIT_S))
    for call in (client.ping, lambda: client.acquire("x"), lambda: client.release(5)):
        with pytest.raises(ConnectionLost, match="the client was closed"):
            call()
    client.close()


def test_the_first_reachable_server_is_used(genie):
    with sync.connect([f"127.0.0.1:{free_port()}", f"127.0.0.1:{genie.port}"]) as client:
        client.ping()


FORKED = """
import os, sys
from genie import sync

with sync.connect(sys.argv[1], int(sys.argv[2])) as client:
    lock = client.acquire("sync/forked")
    with client.lock("sync/block"):
        child = os.fork()
        if child == 0:
            for call in (client.ping, lambda: client.acquire("x"), lock.release, lambda: client.release(lock.id)):
                try:
                    call()
                except RuntimeError as error:
                    print(error)
            print(lock.held)
            with sync.connect(sys.argv[1], int(sys.argv[2])) as own:
                print(own.inspect(resource="sync/forked").holders_total, own.try_acquire("sync/block"), flush=True)
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lock.held)
    lock.release()
    client.ping()
print("done")
"""


def test_in_a_forked_process_calls_raise_and_a_new_client_works(genie):
    """The child inherits the client without its thread. The end of its blocks does not release the locks of the parent."""
    done = python(FORKED, *map(str, genie.address))
    expected_error = "the client was opened before this process was forked: open a new one in this process"
    assert (done.stderr, done.stdout.splitlines()) == ("", [expected_error] * 4 + ["False", "1 None", "3 True", "done"])


UNCLOSED = """
import sys, threading
from genie import sync

client = sync.connect(sys.argv[1], int(sys.argv[2]))
client.__enter__()
lock = client.acquire("sync/unclosed", watchdog=True)
threading.Thread(target=lambda: client.acquire("sync/unclosed", queue_timeout=60), daemon=True).start()
client.ping()
print("end")
"""


def test_an_interpreter_that_ends_with_an_open_client_ends_cleanly(genie):
    done = python(UNCLOSED, *map(str, genie.address))
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_ctrl_c_while_a_client_is_opened_leaves_no_thread():
    main = threading.get_ident()
    before = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def interrupt() -> None:
            with silent.accept()[0] as accepted:
                accepted.recv(1)
                signal.pthread_kill(main, signal.SIGINT)
                while accepted.recv(1 << 16):
                    pass

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt), sync.connect("127.0.0.1", silent.getsockname()[1]):
            pass
        thread.join(WAIT_S)
    assert threading.active_count() == before


def test_a_call_in_the_background_thread_is_an_error_instead_of_a_deadlock(client):
    caught = []

    def call() -> None:
        try:
            client.ping()
        except RuntimeError as error:
            caught.append(str(error))

    client._connection._execute_and_wait(call)
    assert "would block itself" in caught[0]


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
