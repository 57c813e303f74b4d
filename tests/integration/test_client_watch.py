"""Watches of both clients: with real servers that restart and fail over, and with a scripted server."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps

import orjson
import pytest

from genie import Change, Client, ConnectionLost, RequestRejected, connect, sync
from genie.client.aio import Watch
from support.network.clocks import LONG_TIMEOUTS, shorten_keepalive
from support.network.fake_server import Line, error, fake_server
from support.processes.servers import WAIT_S, Genie, Redis, running_server


def with_timeout(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test that fails where it would wait for ever."""

    @wraps(test)
    async def run(*args: object, **fixtures: object) -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await test(*args, **fixtures)

    return run


@pytest.fixture
async def client(genie: Genie):
    async with connect(*genie.address) as client:
        yield client


@pytest.fixture
async def other(genie: Genie):
    async with connect(*genie.address) as client:
        yield client


@pytest.fixture
async def scripted():
    async with fake_server() as scripted:
        yield scripted


@pytest.fixture
async def watcher(scripted):
    """A client of the server that the test speaks for."""
    async with connect("127.0.0.1", scripted.port) as client:
        yield client


def encode(command: str, **payload: object) -> str:
    return orjson.dumps({"command": command, "payload": payload}).decode()


def row(resource: str, id: int = 1) -> dict[str, object]:
    return {"resource": resource, "mode": "exclusive", "id": id}


def watching(*held: dict[str, object]) -> str:
    return encode("watching", prefix="t/", held=held, truncated=False)


def event(state: str, resource: str, id: int = 1) -> str:
    return encode("event", state=state, **row(resource, id))


async def until(applied: dict[tuple[str, int], Change], watch: Watch, names: set[str]) -> None:
    """Apply the changes until the applied shows these names, each held once."""
    while len(applied) != len(names) or {name for name, _ in applied} != names:
        apply(applied, await anext(watch))


def apply(applied: dict[tuple[str, int], Change], change: Change) -> None:
    if change.state == "locked":
        assert applied.setdefault((change.resource, change.id), change) is change
    else:
        del applied[change.resource, change.id]


# -- a real server ----------------------------------------------------------------------------------------


@with_timeout
async def test_held_locks_then_changes(client, other):
    held = await other.acquire("first/1", transaction="t-first")
    async with client.watch("first/") as watch:
        assert await anext(watch) == Change("first/1", "locked", "exclusive", held.id, "t-first")
        async with other.lock("shared:first/2", "elsewhere") as lock:
            assert await anext(watch) == Change("first/2", "locked", "shared", lock.id)
        assert await anext(watch) == Change("first/2", "unlocked", "shared", lock.id)
        await held.release()
        assert await anext(watch) == Change("first/1", "unlocked", "exclusive", held.id, "t-first")
        assert not watch.truncated
        assert watch.prefix == "first/"
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


@with_timeout
async def test_changes_are_buffered_from_the_start_of_the_block(client, genie):
    async with client.watch("block/") as watch:
        await client.ping()
        await (await client.acquire("block/1")).release()
        assert [(await anext(watch)).state for _ in range(2)] == ["locked", "unlocked"]

    def work() -> list[str]:
        with sync.connect(*genie.address) as threads, threads.watch("block/") as watch:
            threads.ping()
            threads.acquire("block/2").release()
            return [next(watch).state for _ in range(2)]

    assert await asyncio.to_thread(work) == ["locked", "unlocked"]


@with_timeout
async def test_a_watch_rejected_before_the_first_wait_raises(scripted, watcher):
    line = await scripted.accept()
    async with watcher.watch("t/") as watch:
        await line.expect("watch")
        line.say(error("too-many"))
        ping = asyncio.create_task(watcher.ping())
        await line.expect("ping")
        line.say(encode("pong"))
        await ping
        with pytest.raises(RequestRejected, match="too-many"):
            await anext(watch)
        with pytest.raises(StopAsyncIteration):
            await anext(watch)


@with_timeout
async def test_two_watches_of_one_prefix_are_independent(client, other):
    first, second = client.watch("two/"), client.watch("two/")
    async with other.lock("two/1"):
        assert await anext(first) == await anext(second)
        async with other.lock("two/2"):
            assert (await anext(first)).resource == "two/2"
            await first.aclose()
        assert [(await anext(second)).state for _ in range(2)] == ["locked", "unlocked"]
    assert (await anext(second)).resource == "two/1"


@with_timeout
async def test_threads_held_locks_then_changes(client, genie):
    held = await client.acquire("threads/1", transaction="t")

    def work() -> list[Change]:
        with sync.connect(*genie.address) as watcher, watcher.watch("threads/") as watch:
            found = [next(watch)]
            with watcher.lock("threads/2", "shared:threads/3"):
                found += [next(watch), next(watch)]
            found += [next(watch), next(watch)]
            assert watch.prefix == "threads/"
            assert not watch.truncated
            return found

    found = await asyncio.to_thread(work)
    assert found[0] == Change("threads/1", "locked", "exclusive", held.id, "t")
    assert {(change.resource, change.mode) for change in found[1:3]} == {
        ("threads/2", "exclusive"),
        ("threads/3", "shared"),
    }
    assert [change.state for change in found] == 3 * ["locked"] + 2 * ["unlocked"]
    await held.release()


@with_timeout
async def test_a_server_side_overflow_causes_a_resync(client, other):
    """All at once: the server says `lagged`, or it does not; who watches needs not know."""
    applied: dict[tuple[str, int], Change] = {}
    watch = client.watch("many/")
    many = await other.acquire_any([f"many/{number}" for number in range(9_900)], 9_900, transaction_timeout=3600)
    await until(applied, watch, {f"many/{number}" for number in range(9_900)})
    few = [f"many/few/{number}" for number in range(1000)]
    _, lock = await asyncio.gather(many.release(), other.acquire(*few, transaction_timeout=3600))
    await until(applied, watch, set(few))
    await lock.release()
    await until(applied, watch, set())


@with_timeout
async def test_a_server_is_killed_and_restarted(redis: Redis):
    with running_server(redis) as durable:
        async with (
            connect(*durable.address, **LONG_TIMEOUTS) as client,
            connect(*durable.address, **LONG_TIMEOUTS) as other,
        ):
            applied: dict[tuple[str, int], Change] = {}
            stays, goes = [await other.acquire(name, transaction_timeout=3600) for name in ("k/stays", "k/goes")]
            watch = client.watch("k/")
            await until(applied, watch, {"k/stays", "k/goes"})
            durable.kill()
            next_change = asyncio.create_task(anext(watch))
            release = asyncio.create_task(goes.release())
            await asyncio.to_thread(durable.start)
            await release
            apply(applied, await next_change)
            assert {name for name, _ in applied} == {"k/stays"}
            assert applied["k/stays", stays.id].id == stays.id
            durable.kill()
            durable.redis_url = None  # it comes back and knows of nothing
            await asyncio.to_thread(durable.start)
            await until(applied, watch, set())


@with_timeout
async def test_the_next_leader_continues_the_watch(redis: Redis):
    with running_server(redis, lease=1) as leader, running_server(redis, lease=1) as follower:
        servers = [f"127.0.0.1:{node.port}" for node in (leader, follower)]
        async with connect(servers, **LONG_TIMEOUTS) as client, connect(servers, **LONG_TIMEOUTS) as other:
            applied: dict[tuple[str, int], Change] = {}
            watch = client.watch("n/")
            lock = await other.acquire("n/1", transaction_timeout=3600)
            await until(applied, watch, {"n/1"})
            next_change = asyncio.create_task(anext(watch))
            leader.kill()
            async with other.lock("n/2", queue_timeout=WAIT_S, transaction_timeout=3600):
                apply(applied, await next_change)
                assert {name for name, _ in applied} == {"n/1", "n/2"}
            await until(applied, watch, {"n/1"})
            await lock.release()
            await until(applied, watch, set())


# -- a server that the test speaks for --------------------------------------------------------------------


async def start_watch(client: Client, line: Line) -> Watch:
    """A watch that has told of one lock."""
    watch = client.watch("t/")
    first = asyncio.create_task(anext(watch))
    assert await line.expect("watch") == {"prefix": "t/"}
    line.say(watching(row("t/1")))
    assert (await first).resource == "t/1"
    return watch


@with_timeout
async def test_the_end_of_the_loop_ends_the_watch(scripted, watcher):
    line = await scripted.accept()

    async def first() -> Change:
        async for change in watcher.watch("t/"):
            return change
        raise AssertionError

    found = asyncio.create_task(first())
    await line.expect("watch")
    line.say(watching(row("t/1"), row("t/2", 2)))
    assert (await found).resource == "t/1"
    gc.collect()
    assert await line.expect("unwatch") == {"prefix": "t/"}


@with_timeout
async def test_cancelling_the_consumer_ends_the_watch(scripted, watcher):
    line = await scripted.accept()
    watch = await start_watch(watcher, line)
    waiting = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await line.expect("unwatch")
    line.say(event("locked", "t/2"), encode("unwatched", prefix="t/"))
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


@with_timeout
async def test_aclose_wakes_a_waiting_consumer(scripted, watcher):
    line = await scripted.accept()
    watch = await start_watch(watcher, line)
    waiting = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="already waits for the next change"):
        await anext(watch)
    await watch.aclose()
    await watch.aclose()
    await asyncio.sleep(0)
    assert watcher._connection.session.data_to_send() == b"", "it is sent at once"
    await line.expect("unwatch")
    with pytest.raises(StopAsyncIteration):
        await waiting


@with_timeout
async def test_closing_the_client_ends_the_loop(scripted):
    seen = []
    async with connect("127.0.0.1", scripted.port) as client:
        line = await scripted.accept()

        async def look() -> None:
            seen.extend([change async for change in client.watch("t/")])

        looking = asyncio.create_task(look())
        await line.expect("watch")
        line.say(watching(row("t/1")))
        watch = client.watch("t/")
        waiting = asyncio.create_task(anext(watch))
        await line.expect("watch")
        line.say(watching(row("t/1")))
        await waiting
    await looking
    assert len(seen) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    await watch.aclose()
    with pytest.raises(ConnectionLost):
        await anext(client.watch("t/"))


@with_timeout
async def test_a_client_that_was_never_opened():
    watch = connect("127.0.0.1", 1).watch("t/")
    with pytest.raises(RuntimeError, match="not entered"):
        await anext(watch)
    await watch.aclose()
    with pytest.raises(RuntimeError, match="not entered"):
        next(sync.connect("127.0.0.1", 1).watch("t/"))


@with_timeout
async def test_a_rejected_watch_raises(scripted, watcher):
    line = await scripted.accept()
    watch = watcher.watch("t/")
    first = asyncio.create_task(anext(watch))
    await line.expect("watch")
    line.say(error("too-many"))
    with pytest.raises(RequestRejected, match="too-many"):
        await first
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    with pytest.raises(ValueError, match="a prefix"):
        watcher.watch("x" * 513)


@with_timeout
async def test_a_silent_server_is_left(scripted):
    async with fake_server() as second:
        servers = [f"127.0.0.1:{each.port}" for each in (scripted, second)]
        async with connect(servers) as client:
            line = await scripted.accept()
            watch = await start_watch(client, line)
            waiting = asyncio.create_task(anext(watch))
            shorten_keepalive(client._connection.session, asyncio.get_running_loop().time())
            client._connection.flush_soon()
            await line.expect("ping")
            assert await line.rest() == [], "nothing more is said, and the connection ends"
            line = await second.accept()
            await line.expect("watch")
            line.say(watching())
            assert (await waiting).state == "unlocked"


class TestThreads:
    @with_timeout
    async def test_the_difference_is_reported_after_a_reconnect_and_the_end_of_the_loop_ends_the_watch(self, scripted):
        left = threading.Event()

        def work() -> list[Change]:
            with sync.connect("127.0.0.1", scripted.port) as client:
                found = []
                for change in client.watch("t/"):
                    found.append(change)
                    if len(found) == 3:
                        break
                assert left.wait(WAIT_S)
            return found

        working = asyncio.create_task(asyncio.to_thread(work))
        line = await scripted.accept()
        await line.expect("watch")
        line.say(watching(row("t/1")))
        line.writer.write_eof()
        line = await scripted.accept()
        await line.expect("watch")
        line.say(watching(row("t/2", 2)))
        await line.expect("unwatch")
        left.set()
        assert await working == [
            Change("t/1", "locked", "exclusive", 1),
            Change("t/1", "unlocked", "exclusive", 1),
            Change("t/2", "locked", "exclusive", 2),
        ]

    @with_timeout
    async def test_close_wakes_a_waiting_consumer(self, scripted):
        asked = threading.Event()

        def work() -> None:
            with sync.connect("127.0.0.1", scripted.port) as client, ThreadPoolExecutor() as threads:
                watch = client.watch("t/")
                waiting = threads.submit(list, watch)
                assert asked.wait(WAIT_S)
                with pytest.raises(RuntimeError, match="already waits for the next change"):
                    next(watch)
                assert not waiting.done(), "the one who waited goes on"
                assert not watch._watch.ended
                watch.close()
                watch.close()
                assert client._connection.aio.session.data_to_send() == b"", "it is sent at once"
                assert waiting.result() == []

        working = asyncio.create_task(asyncio.to_thread(work))
        line = await scripted.accept()
        await line.expect("watch")
        asked.set()
        await line.expect("unwatch")
        await working

    @with_timeout
    async def test_closing_the_client_ends_the_loop(self, scripted):
        told = threading.Event()

        def work() -> None:
            with ThreadPoolExecutor() as threads:
                with sync.connect("127.0.0.1", scripted.port) as client:
                    watch = client.watch("t/")
                    waiting = threads.submit(lambda: [told.set() for _ in watch])
                    assert told.wait(WAIT_S)
                assert waiting.result() == [None]
                assert list(watch) == []
                watch.close()
                with pytest.raises(ConnectionLost):
                    next(client.watch("t/"))

        working = asyncio.create_task(asyncio.to_thread(work))
        line = await scripted.accept()
        await line.expect("watch")
        line.say(watching(row("t/1")))
        await working

    @with_timeout
    async def test_a_rejected_watch_raises(self, scripted):
        def work() -> None:
            with sync.connect("127.0.0.1", scripted.port) as client:
                watch = client.watch("t/")
                with pytest.raises(RequestRejected, match="too-many"):
                    next(watch)
                assert list(watch) == []

        working = asyncio.create_task(asyncio.to_thread(work))
        line = await scripted.accept()
        await line.expect("watch")
        line.say(error("too-many"))
        await working
