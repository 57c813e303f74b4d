"""`genie release --transaction` and `--prefix`: cleaning up after a crash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from click.testing import CliRunner, Result

import genie
from genie.cli import main
from support.processes.servers import Genie, running_server

HOUR = 3600.0


@pytest.fixture(scope="module")
def server() -> Iterator[Genie]:
    with running_server() as running:
        yield running


@pytest.fixture
async def client(server: Genie) -> AsyncIterator[genie.Client]:
    async with genie.connect(*server.address) as connected:
        yield connected


async def release(server: Genie, *args: str, answer: str = "") -> Result:
    """Run the command in a thread, with `answer` as its input."""
    return await asyncio.to_thread(
        CliRunner().invoke, main, ["release", "--port", str(server.port), *args], input=answer
    )


async def held(client: genie.Client, resource: str) -> list[int]:
    return [row.id for row in (await client.inspect(resource=resource, only="holders")).holders]


@asynccontextmanager
async def waiting(client: genie.Client, resource: str, transaction: str) -> AsyncIterator[asyncio.Task[Any]]:
    """Let a request wait for a held resource."""
    task = asyncio.create_task(
        client.acquire(resource, transaction=transaction, queue_timeout=HOUR, transaction_timeout=HOUR)
    )
    while not (await client.inspect(resource=resource)).queue_total:
        assert not task.done()
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, genie.GenieError):
            await task


async def test_a_transaction_is_listed_and_released_after_confirmation(server: Genie, client: genie.Client) -> None:
    locks = [await client.acquire(f"t/{n}", transaction="t", transaction_timeout=HOUR) for n in range(2)]
    other = await client.acquire("u/0", transaction="u", transaction_timeout=HOUR)
    async with waiting(client, "u/0", "t") as waiter:
        declined = await release(server, "--transaction", "t", answer="n\n")
        assert declined.exit_code == 1
        assert "Release these 3 requests? [y/N]: n" in declined.stdout
        assert await held(client, "t/0") == [locks[0].id]
        assert not waiter.done()

        done = await release(server, "--transaction", "t", answer="y\n")
        assert done.exit_code == 0
        for expected in ("Held: 2\n", "Waiting: 1\n", "exclusive:t/0", "exclusive:t/1", f"└ {other.id} of u holds"):
            assert expected in done.stdout
        assert done.stdout.endswith("Released: 3\n")
        with pytest.raises(genie.GenieError):
            await waiter
    assert [await held(client, name) for name in ("t/0", "t/1", "u/0")] == [[], [], [other.id]]
    await other.release()


async def test_without_a_confirmation_nothing_is_released(server: Genie, client: genie.Client) -> None:
    lock = await client.acquire("t/0", transaction="t", transaction_timeout=HOUR)
    unanswered = await release(server, "--transaction", "t")
    assert unanswered.exit_code == 1
    assert unanswered.stderr == "genie: nothing was released\n"
    assert await held(client, "t/0") == [lock.id]
    done = await release(server, "--transaction", "t", "--yes", "--json")
    assert json.loads(done.stdout) == {"released": [{"id": lock.id, "reason": "success"}], "complete": True}
    again = await release(server, "--transaction", "t", "--yes")
    assert (again.exit_code, again.stdout) == (0, "Nothing to release.\n")


async def test_a_prefix_releases_locks_and_grants_waiting_requests(server: Genie, client: genie.Client) -> None:
    both = await client.acquire("p/a", "q/a", transaction_timeout=HOUR)
    shared = [await client.acquire("shared:p/b", transaction_timeout=HOUR) for _ in range(2)]
    other = await client.acquire("q/b", "px", transaction_timeout=HOUR)
    async with waiting(client, "p/a", "next") as waiter:
        done = await release(server, "--prefix", "p/", "--yes")
        assert done.exit_code == 0
        assert "Held: 3\n" in done.stdout
        assert f"{both.id}  -            exclusive:p/a exclusive:q/a" in done.stdout, (
            "the other resources of a request are shown"
        )
        assert done.stdout.endswith("Released: 3\n")
        granted = await waiter
        assert await held(client, "p/a") == [granted.id]
        assert [await held(client, name) for name in ("q/a", "p/b", "q/b")] == [[], [], [other.id]]
        for lock in (both, *shared):
            await lock.lost.wait()
        await granted.release()
    none = await release(server, "--prefix", "p/", "--yes", "--json")
    assert json.loads(none.stdout) == {"released": [], "complete": True}
    await other.release()


async def test_a_prefix_does_not_release_the_subtrees_that_contain_it(server: Genie, client: genie.Client) -> None:
    above = await client.acquire("shared:s/**", transaction_timeout=HOUR)
    within = [await client.acquire(name, transaction_timeout=HOUR) for name in ("shared:s/1/**", "shared:s/1/x")]
    done = await release(server, "--prefix", "s/1", "--yes")
    assert "s/**" not in done.stdout
    assert done.stdout.endswith("Released: 2\n")
    for lock in within:
        await lock.lost.wait()
    assert await held(client, "s/1/x") == [above.id]
    await above.release()


async def test_the_rows_to_confirm_have_whole_names_and_those_with_the_prefix_first(
    server: Genie, client: genie.Client
) -> None:
    names = [f"{'a' * 40}/{number}" for number in range(12)] + ["zone/" + "z" * 80]
    async with client.lock(*names, transaction="transfer-00000000-0000-0000-0000-000000000001"):
        shown = (await release(server, "--prefix", "zone/", answer="n\n")).output
    (row,) = [line for line in shown.splitlines() if "transfer-" in line]
    assert "transfer-00000000-0000-0000-0000-000000000001  exclusive:zone/" + "z" * 80 + " exclusive:aaa" in row


async def test_locks_of_a_prefix_are_listed_by_name(server: Genie, client: genie.Client) -> None:
    for name in ("n/12", "n/1", "n/b", "n/2", "n/10/x"):
        await client.acquire(name, "a/99", transaction="one", transaction_timeout=HOUR)
    await client.acquire("shared:n/a", transaction_timeout=HOUR)
    done = await release(server, "--prefix", "n/", "--yes")
    listed = [word.partition(":")[2] for line in done.stdout.splitlines() for word in line.split() if ":n/" in word]
    assert listed == ["n/1", "n/2", "n/10/x", "n/12", "n/a", "n/b"]


async def test_many_locks_are_released(server: Genie, client: genie.Client) -> None:
    """More than `MAX_CONCURRENT_COMMANDS`."""
    await asyncio.gather(*(client.acquire(f"m/{n}", transaction_timeout=HOUR) for n in range(250)))
    done = await release(server, "--prefix", "m/", "--yes")
    assert "Held: 250\n" in done.stdout
    assert done.stdout.endswith("Released: 250\n")
    assert (await client.inspect()).holders_total == 0


async def test_a_lock_that_ended_before_the_confirmation_is_reported(
    server: Genie, client: genie.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock times out between the list and the confirmation; that is not an error."""
    short = await client.acquire("e/0", transaction="e", transaction_timeout=HOUR)
    await client.acquire("e/1", transaction="e", transaction_timeout=HOUR)
    loop = asyncio.get_running_loop()

    def confirm(*_: object, **__: object) -> bool:
        async def end() -> None:
            # By another client: the one that holds the lock would release it if the reply took more than a millisecond,
            # and then the reason would be "success".
            async with genie.connect(*server.address) as other:
                await other.extend(short.id, 0.001)
            await short.lost.wait()

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        return True

    monkeypatch.setattr("click.confirm", confirm)
    done = await release(server, "--transaction", "e")
    assert done.exit_code == 0
    assert "Held: 2\n" in done.stdout
    assert done.stdout.endswith(f"Released: 1\n  {short.id}: transaction-timeout\n")
    assert await held(client, "e/1") == []


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "give exactly one of ID, --transaction and --prefix"),
        (["7", "--prefix", "a"], "give exactly one of ID, --transaction and --prefix"),
        (["--transaction", "t", "--prefix", "a"], "give exactly one of"),
        (["7", "--yes"], "an ID is released without confirmation"),
        (["--transaction", "t", "--json"], "--json cannot ask for confirmation: add --yes"),
        (["--prefix", "", "--yes"], "--prefix must not be empty"),
    ],
)
async def test_invalid_arguments_release_nothing(
    server: Genie, client: genie.Client, args: list[str], expected: str
) -> None:
    lock = await client.acquire("a", transaction="t", transaction_timeout=HOUR)
    done = await release(server, *args)
    assert done.exit_code == 2
    assert expected in done.stderr
    assert await held(client, "a") == [lock.id]
    await lock.release()
