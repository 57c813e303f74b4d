"""The clients find the leader: redirects by followers, and servers that reject them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from typing import Any

import pytest

from genie import RequestRejected, Unavailable, connect, sync
from genie.backoff import Backoff
from genie.client import failover
from genie.client.failover import ServerList
from genie.client.process import Process, use_process
from support.network.clocks import LONG_S, skip
from support.network.fake_server import PONG, Fake, error, fake_server
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie


@pytest.fixture
async def nodes():
    """Three servers, of which none leads."""
    async with asyncio.timeout(2 * WAIT_S), AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(fake_server()) for _ in range(3)]
        for node in nodes:
            node.refusal = follower()
            node.sessions = nodes[0].sessions
        yield nodes


def follower(leader: Fake | Genie | None = None) -> str:
    named = {} if leader is None else {"leader": f"127.0.0.1:{leader.port}"}
    return error("unavailable", "this node does not lead", **named)


def addresses(*nodes: Fake | Genie) -> list[str]:
    return [f"127.0.0.1:{node.port}" for node in nodes]


async def test_a_redirect_to_an_unlisted_leader_is_followed(nodes, genie):
    nodes[0].refusal = follower(nodes[1])
    nodes[1].refusal = follower(genie)
    async with connect(addresses(nodes[0])) as client, client.lock("named"):
        await client.ping()
    assert nodes[1].lines.qsize() == 1


async def test_threads_a_redirect_to_an_unlisted_leader_is_followed(nodes, genie):
    def work() -> None:
        with sync.connect(addresses(nodes[0])) as client, client.lock("named"):
            client.ping()

    nodes[0].refusal = follower(nodes[1])
    nodes[1].refusal = follower(genie)
    await asyncio.to_thread(work)
    assert nodes[1].lines.qsize() == 1


async def test_the_first_connection_waits_for_a_failover(nodes):
    entering = asyncio.create_task(connect([*addresses(*nodes), f"127.0.0.1:{free_port()}"]).__aenter__())
    for _ in range(2):
        await nodes[2].accept()
    nodes[1].refusal = None
    client = await entering
    await client.close()


async def test_threads_the_first_connection_waits_for_a_failover(nodes):
    def work() -> None:
        with sync.connect([*addresses(*nodes), f"127.0.0.1:{free_port()}"]):
            pass

    entering = asyncio.create_task(asyncio.to_thread(work))
    for _ in range(2):
        await nodes[2].accept()
    nodes[1].refusal = None
    await entering


@pytest.mark.parametrize("threads", [False, True])
async def test_the_first_connection_is_bounded_and_a_redirect_loop_has_a_backoff(nodes, threads, monkeypatch):
    first, second, third = nodes
    first.refusal, second.refusal = follower(second), follower(first)

    def work() -> None:
        # uvloop, which a client for threads prefers, takes its time from elsewhere
        with use_process(Process(new_event_loop=asyncio.new_event_loop)), threads_client:
            pass

    client = connect(addresses(*nodes), connect_timeout=LONG_S)
    threads_client = sync.connect(addresses(*nodes), connect_timeout=LONG_S)
    for connection in (client._connection, threads_client._connection.aio):
        connection._servers.attempt_timeout_s = 2 * WAIT_S  # `skip` must end the whole only, not an attempt
    entering = asyncio.create_task(asyncio.to_thread(work) if threads else client.__aenter__())
    for _ in range(2):
        await third.accept()
    skip(monkeypatch, LONG_S)
    with pytest.raises(Unavailable, match=r"no serving leader at .*this node does not lead"):
        await entering
    tried = [len(node.open) for node in nodes]
    assert max(tried) - min(tried) <= 1, "each once a round"
    assert max(tried) > 1


async def test_a_cancelled_attempt_does_not_replace_the_reported_reason(nodes, monkeypatch):
    client = connect(addresses(nodes[0]), connect_timeout=LONG_S)
    client._connection._servers.attempt_timeout_s = WAIT_S
    entering = asyncio.create_task(client.__aenter__())
    await nodes[0].accept()
    nodes[0].silent = True
    await nodes[0].accept()
    skip(monkeypatch, LONG_S)
    with pytest.raises(Unavailable, match="this node does not lead"):
        await entering


@pytest.mark.parametrize("threads", [False, True])
async def test_a_client_may_be_entered_before_its_server_starts(threads, monkeypatch):
    def work() -> None:
        with sync.connect(server, connect_timeout=LONG_S):
            pass

    async def enter() -> None:
        async with connect(server, connect_timeout=LONG_S):
            pass

    server, failed = f"127.0.0.1:{free_port()}", asyncio.Event()
    loop, on_failure = asyncio.get_running_loop(), ServerList.on_failure

    def note_failure(*arguments: Any) -> None:
        on_failure(*arguments)
        loop.call_soon_threadsafe(failed.set)

    monkeypatch.setattr(ServerList, "on_failure", note_failure)
    async with asyncio.timeout(WAIT_S):
        entering = asyncio.create_task(asyncio.to_thread(work) if threads else enter())
        await failed.wait()  # the port refuses connections
        async with fake_server(int(server.rpartition(":")[2])):
            await entering


async def test_entering_ends_after_connect_timeout_with_the_reason():
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Unavailable, match=r"no server at .*Connect call failed"):
            await connect(f"127.0.0.1:{free_port()}", connect_timeout=0.2).__aenter__()


async def test_a_lazy_client_enters_at_once_and_connects_when_its_server_starts():
    port = free_port()
    async with asyncio.timeout(WAIT_S), connect("127.0.0.1", port, lazy=True, response_timeout=0.1) as client:
        with pytest.raises(Unavailable, match="no server at"):
            await client.try_acquire("a")
        waiting = asyncio.create_task(client.acquire("b", queue_timeout=None))
        async with fake_server(port) as node:
            await (await node.accept()).grant()
            await waiting


def test_threads_a_lazy_client_enters_at_once():
    with (
        sync.connect("127.0.0.1", free_port(), lazy=True, response_timeout=0.1) as client,
        pytest.raises(Unavailable, match="no server at"),
    ):
        client.try_acquire("a")


async def test_a_server_that_hangs_leaves_time_for_the_next_one(nodes, genie):
    for hanging in nodes:
        hanging.silent = True
    async with connect(addresses(*nodes, genie), connect_timeout=1.0) as client:
        await client.ping()
        assert client._connection._servers.addresses[0].port == genie.port, "the servers that hang are tried last"


async def test_a_name_is_looked_up_once_at_a_time(monkeypatch):
    """Each lookup occupies a thread of the program."""
    started = 0

    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        nonlocal started
        started += 1
        return await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(failover, "ATTEMPT_TIMEOUT_S", 0.01)
    with pytest.raises(Unavailable):
        await connect("genie.test,genie2.test", connect_timeout=0.3).__aenter__()
    assert started == 2
    await asyncio.sleep(0)  # the lookups are cancelled
    assert len(asyncio.all_tasks()) == 1


async def test_the_next_round_gets_the_result_of_a_late_lookup(monkeypatch):
    """The system asks its second name server after 5 s, in each lookup."""

    async def getaddrinfo(_loop: Any, _host: str, port: int, **_options: Any) -> list[Any]:
        await asyncio.sleep(0.11)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    async with asyncio.timeout(WAIT_S), fake_server() as node:
        client = connect("genie.test", node.port, connect_timeout=3.0)
        servers = client._connection._servers
        servers.attempt_timeout_s, servers._backoff = 0.1, Backoff(0.1, 0.1)
        async with client:
            pass


@pytest.mark.parametrize("connect_to", [connect, sync.connect])
def test_a_token_of_a_wrong_type(connect_to):
    async def token() -> str:
        return "a token"

    for wrong in (5, b"bytes", token):
        with pytest.raises(TypeError, match="token must be a string, or a function without await"):
            connect_to("127.0.0.1", 1, token=wrong)


async def test_the_token_is_read_again_for_every_connection(monkeypatch, tmp_path):
    def token() -> str:
        if not words:
            raise RuntimeError("the vault is sealed")
        return words.pop(0)

    words, file = ["first", "second", "third"], tmp_path / "token"
    file.write_text("old")
    monkeypatch.setenv("GENIE_TOKEN_FILE", str(file))
    async with asyncio.timeout(WAIT_S), fake_server() as node, connect("127.0.0.1", node.port, token=token):
        line = await node.accept()
        async with connect("127.0.0.1", node.port):
            other = await node.accept()
            file.write_text("new")
            other.cut()
            await node.accept()
            line.cut()
            await node.accept()
    assert [hello["token"] for hello in node.hellos] == ["first", "old", "new", "second"]
    words.clear()
    with pytest.raises(Unavailable, match="no token or certificate for the connection: the vault is sealed"):
        await connect("127.0.0.1", node.port, token=token, connect_timeout=0.1).__aenter__()


async def test_a_lazy_client_that_its_servers_reject_fails_its_calls(nodes):
    nodes[0].refusal = error("unauthorized", "this token is unknown")
    async with connect(addresses(nodes[0]), lazy=True) as client:
        with pytest.raises(RequestRejected, match="this token is unknown"):
            await client.ping()


@contextmanager
def unanswering(host: str, port: int) -> Iterator[None]:
    """A port whose connection attempts get no answer, because its backlog is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(0)
        stack.enter_context(socket.create_connection((host, port)))
        with suppress(BlockingIOError):
            pending = stack.enter_context(socket.socket())
            pending.setblocking(False)
            pending.connect((host, port))
        yield


async def test_a_server_that_does_not_answer_does_not_delay_the_next_one():
    async with asyncio.timeout(WAIT_S), fake_server() as node:
        with unanswering("127.0.0.2", node.port):
            client = connect([f"127.0.0.2:{node.port}", f"127.0.0.1:{node.port}"])
            client._connection._servers.attempt_timeout_s = 3600.0
            async with client:
                pass


async def test_every_address_of_a_name_is_tried_without_waiting_for_one_that_does_not_answer(monkeypatch):
    async def getaddrinfo(_loop: Any, host: str, port: int, **_options: Any) -> list[Any]:
        assert host == "genie.test"
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("127.0.0.2", "127.0.0.3", "127.0.0.1")
        ]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    async with asyncio.timeout(WAIT_S), fake_server() as node:
        with unanswering("127.0.0.2", node.port):
            client = connect("genie.test", node.port)
            client._connection._servers.attempt_timeout_s = 3600.0
            async with client:
                pass


async def test_threads_one_background_thread_makes_all_attempts(nodes):
    def work() -> None:
        with sync.connect(addresses(*nodes)):
            loop.call_soon_threadsafe(entered.set)
            assert done.wait(WAIT_S)

    def background_threads() -> int:
        return sum(thread.name.startswith("genie-client") for thread in threading.enumerate())

    loop, entered, done = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    nodes[0].refusal = None
    task = asyncio.create_task(asyncio.to_thread(work))
    line = await nodes[0].accept()
    await entered.wait()
    nodes[0].refusal = follower()
    line.cut()
    for _ in range(3):
        for node in nodes:
            await node.accept()
            assert background_threads() == 1
    done.set()
    await task


@pytest.mark.parametrize("name", ["ping", "inspect"])
async def test_a_call_rejected_by_a_leader_that_steps_down_raises_unavailable(nodes, name):
    first, second, _ = nodes
    first.refusal = second.refusal = None
    async with connect(addresses(first, second)) as client:
        line = await first.accept()
        call = asyncio.create_task(getattr(client, name)())
        await line.expect(name)
        line.say(follower(second))
        with pytest.raises(Unavailable, match="does not lead"):
            await call
        call = asyncio.create_task(client.ping())
        line = await second.accept()
        await line.expect("ping")
        line.say(PONG)
        await call


class TestFinalErrors:
    """A server that rejects a client for good does not speak for the others."""

    async def test_of_one_server_do_not_fail_calls_that_another_may_serve(self, nodes):
        first, second, _ = nodes
        first.refusal = None
        async with connect(addresses(first, second), connect_timeout=WAIT_S) as client:
            line = await first.accept()
            waiting = asyncio.create_task(client.acquire("a"))
            await line.expect("request")
            first.refusal = error("unauthorized")
            line.cut()
            await second.accept()
            await second.accept()
            second.refusal = None
            await (await second.accept()).grant()
            assert (await waiting).id == 101

    async def test_of_one_server_are_reported_if_no_other_one_is_available(self, nodes):
        first, second, _ = nodes
        first.refusal = error("unauthorized", "hello carried no token")
        with pytest.raises(Unavailable, match="unauthorized: hello carried no token"):
            await connect(addresses(first, second), connect_timeout=2).__aenter__()
