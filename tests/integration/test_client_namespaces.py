"""Clients with a namespace: asyncio, threads and the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest

from genie import RequestRejected, connect, sync
from genie.client import config
from support.network.clocks import LONG_S
from support.network.fake_server import PONG, Fake, Line, error, fake_server, locked
from support.processes.commands import genie_cli
from support.processes.servers import WAIT_S, Genie

NAMESPACE_ERROR = "must be a string of 1 to 128 letters, digits or any of _.:-"
SECRET = "a-secret-of-the-tests"  # noqa: S105 - it opens nothing


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GENIE_NAMESPACE", raising=False)


@pytest.fixture
async def nodes() -> AsyncIterator[list[Fake]]:
    async with asyncio.timeout(2 * WAIT_S), AsyncExitStack() as stack:
        yield [await stack.enter_async_context(fake_server()) for _ in range(2)]


def addresses(*nodes: Fake | Genie) -> list[str]:
    return [f"127.0.0.1:{node.port}" for node in nodes]


async def ping_with_asyncio(to: list[str], **options: Any) -> None:
    async with connect(to, **options) as client:
        await client.ping()


async def ping_with_threads(to: list[str], **options: Any) -> None:
    def work() -> None:
        with sync.connect(to, **options) as client:
            client.ping()

    await asyncio.to_thread(work)


async def answer_ping(line: Line) -> None:
    await line.expect("ping")
    line.say(PONG)


both = pytest.mark.parametrize("ping", [ping_with_asyncio, ping_with_threads])


@both
async def test_every_hello_has_the_namespace(
    nodes: list[Fake], ping: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    first.namespace = second.namespace = None
    first.refusal = error("unavailable", "this node does not lead", leader=addresses(second)[0])
    for given, variable, said in (
        ("billing", "", "billing"),
        (None, "stock", "stock"),
        ("billing", "stock", "billing"),
    ):
        monkeypatch.setenv("GENIE_NAMESPACE", variable)
        pinging = asyncio.create_task(ping(addresses(first), namespace=given, session=SECRET, token="a-token"))
        await answer_ping(await second.accept())
        await pinging
        for hello in (first.hellos.pop(), second.hellos.pop()):
            assert (hello["session"], hello["token"], hello["namespace"]) == (SECRET, "a-token", said)


@both
async def test_without_a_namespace_any_is_accepted(nodes: list[Fake], ping: Callable[..., Any]) -> None:
    pinging = asyncio.create_task(ping(addresses(nodes[0])))
    await answer_ping(await nodes[0].accept())
    await pinging
    assert "namespace" not in nodes[0].hellos[0]


@both
async def test_a_server_that_does_not_confirm_the_namespace_is_rejected(
    nodes: list[Fake], ping: Callable[..., Any]
) -> None:
    with pytest.raises(RequestRejected, match="the server serves the namespace 'n', not 'billing'"):
        await ping(addresses(nodes[0]), namespace="billing")
    assert len(nodes[0].hellos) == 1, "it is not asked again and again"
    nodes[1].namespace = None
    pinging = asyncio.create_task(ping(addresses(*nodes), namespace="billing"))
    await answer_ping(await nodes[1].accept())
    await pinging


@both
async def test_an_unknown_namespace_is_a_final_error(genie: Genie, ping: Callable[..., Any]) -> None:
    with pytest.raises(RequestRejected, match="unknown-namespace: this server does not serve the namespace 'billing'"):
        await ping(addresses(genie), namespace="billing", connect_timeout=LONG_S)
    await ping(addresses(genie), namespace="genie")


@pytest.mark.parametrize("threads", [False, True])
async def test_a_waiting_request_is_never_sent_to_another_namespace(nodes: list[Fake], threads: bool) -> None:
    def work() -> int:
        with sync.connect(addresses(*nodes), namespace="billing") as client:
            return client.acquire("a").id

    async def wait() -> int:
        async with connect(addresses(*nodes), namespace="billing") as client:
            return (await client.acquire("a")).id

    first, second = nodes
    first.namespace = None
    waiting = asyncio.create_task(asyncio.to_thread(work) if threads else wait())
    line = await first.accept()
    asked = await line.expect("request")
    line.cut()
    line = await second.accept()
    assert await line.rest() == [], "it leaves a server of another namespace without a word"
    line = await first.accept()
    assert await line.expect("request") == asked
    line.say(locked(asked["ref"]))
    assert await waiting == 101


@pytest.mark.parametrize("connect", [connect, sync.connect])
@pytest.mark.parametrize("wrong", ["", "a b", "a/b", "ä", "x" * 129, "a\n"])
def test_invalid_namespaces_are_rejected_at_once(
    connect: Callable[..., Any], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"^namespace {NAMESPACE_ERROR}, not '"):
        connect(namespace=wrong)
    if wrong:
        monkeypatch.setenv("GENIE_NAMESPACE", wrong)
        with pytest.raises(ValueError, match=f"^GENIE_NAMESPACE {NAMESPACE_ERROR}, not '"):
            connect()
    with pytest.raises(ValueError, match=r"^namespace "):
        connect(namespace=7)


def test_the_sources_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.resolve_namespace() is None
    monkeypatch.setenv("GENIE_NAMESPACE", "")
    assert config.resolve_namespace() is None
    monkeypatch.setenv("GENIE_NAMESPACE", "stock")
    assert config.resolve_namespace() == "stock"
    assert config.resolve_namespace("billing") == "billing"


ASKING = (
    ("status",),
    ("inspect",),
    ("waits",),
    ("explain", "7"),
    ("release", "7"),
    ("watch", "a"),
    ("bench", "own", "--connections", "1", "--seconds", "0.1", "--warm-up", "0"),
)


def test_commands_use_the_namespace(genie: Genie) -> None:
    """All at once, since each of them goes on to look for a server that serves it, for so long."""

    def ask(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return genie_cli(*words, "--timeout", "5", "--namespace", "billing", port=genie.port)

    with ThreadPoolExecutor(len(ASKING)) as threads:
        for words, done in zip(ASKING, threads.map(ask, ASKING), strict=True):
            assert done.returncode == 1, (words, done.stderr)
            assert "this server does not serve the namespace 'billing'" in done.stderr, words


def test_commands_use_the_variable_and_report_its_errors(genie: Genie) -> None:
    done = genie_cli("run", "x", "--namespace", "genie", "--", sys.executable, "-c", "print('done')", port=genie.port)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    quick = ("--connections", "2", "--seconds", "1", "--warm-up", "0")
    done = genie_cli("bench", "own", *quick, "--json", port=genie.port, namespace="genie")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    done = genie_cli("status", port=genie.port, namespace="a b")
    assert done.returncode == 2
    assert f"it {NAMESPACE_ERROR}, not 'a b'" in " ".join(done.stderr.split())


async def test_commands_send_the_namespace(nodes: list[Fake]) -> None:
    nodes[0].namespace = None
    words = ("run", "a", "--namespace", "billing", "--", "true")
    running = asyncio.create_task(asyncio.to_thread(genie_cli, *words, port=nodes[0].port))
    line = await nodes[0].accept()
    await line.grant()
    await line.release()
    assert (await running).returncode == 0
    assert nodes[0].hellos[0]["namespace"] == "billing"


async def test_a_namespace_rejected_for_a_missing_permission_is_reported(nodes: list[Fake]) -> None:
    nodes[0].refusal = error("unauthorized", "this name may not ask there")
    with pytest.raises(RequestRejected, match="may not ask there"):
        await ping_with_asyncio(addresses(nodes[0]), namespace="billing")
