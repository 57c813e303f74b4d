"""Leader election with both clients: one leader at a time, resignation, a lost leadership, a leader that was killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from genie import Client, LockLost, TransactionTimeout, sync
from support.processes.servers import WAIT_S, Genie

LEAD_UNTIL_KILLED = """\
import sys, threading
import genie
with genie.sync.connect(sys.argv[1], int(sys.argv[2])) as client:
    with client.elect("leader/killed", transaction_timeout=1.0) as leadership:
        print(leadership.fence, flush=True)
        threading.Event().wait()
"""


async def until_candidate(client: Client, name: str) -> None:
    while (await client.inspect(resource=name)).queue_total == 0:
        pass


async def test_a_candidate_waits_without_a_limit_until_the_leader_resigns(client, other):
    leads = asyncio.Event()

    async def run_for_leader() -> int:
        async with other.elect("leader/resigned") as leadership:
            leads.set()
            return leadership.fence

    async with client.elect("leader/resigned", transaction_timeout=30, note="host a") as leadership:
        candidate = asyncio.create_task(run_for_leader())
        await until_candidate(client, "leader/resigned")
        found = await client.inspect(resource="leader/resigned")
        (holder,), (waiter,) = found.holders, found.queue
        assert (holder.resources, holder.note) == (("exclusive:leader/resigned",), "host a")
        assert 20 < holder.expires_in <= 30
        assert waiter.expires_in is None
        assert leadership.held
        assert not leads.is_set()
    assert await candidate > leadership.fence


async def test_a_leadership_is_extended_while_its_block_runs(client):
    async with client.elect("leader/extended", transaction_timeout=30) as leadership:
        link, request = client._connection, leadership._request
        first = request.expires_at
        link.session.requests.live.renew_all(asyncio.get_running_loop().time())
        link.flush_soon()
        while request.expires_at == first:
            await client.ping()
        assert leadership.held


async def test_a_leader_that_is_not_extended_in_time_is_cancelled(client):
    with pytest.raises(TransactionTimeout):
        async with client.elect("leader/late") as leadership:
            with suppress(LockLost):
                await leadership.extend(0.001)
            await asyncio.Event().wait()
    assert leadership.lost.is_set()
    assert asyncio.current_task().cancelling() == 0


async def test_an_operator_who_releases_the_lock_makes_the_next_candidate_lead(client, other):
    leads = asyncio.Event()

    async def lead_once() -> None:
        async with other.elect("leader/removed"):
            leads.set()

    with pytest.raises(LockLost, match="released by its id"):
        async with client.elect("leader/removed") as leadership:
            candidate = asyncio.create_task(lead_once())
            await until_candidate(client, "leader/removed")
            await client.release((await client.inspect(resource="leader/removed")).holders[0].id)
            await asyncio.Event().wait()
    assert not leadership.held
    await candidate
    assert leads.is_set()


async def test_a_cancelled_candidate_does_not_lead_later(client, other):
    async with client.elect("leader/cancelled"):
        candidate = asyncio.create_task(other.elect("leader/cancelled").__aenter__())
        await until_candidate(client, "leader/cancelled")
        candidate.cancel()
        with pytest.raises(asyncio.CancelledError):
            await candidate
    lock = await client.acquire("leader/cancelled")
    await lock.release()


async def test_the_name_has_no_mode(client):
    async with client.elect("shared:odd"):
        assert (await client.inspect(resource="shared:odd")).holders[0].resources == ("exclusive:shared:odd",)


def test_a_leader_that_was_killed_is_succeeded(genie: Genie) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAD_UNTIL_KILLED, *map(str, genie.address)], stdout=subprocess.PIPE, text=True
    ) as leader:
        try:
            assert leader.stdout is not None
            fence = int(leader.stdout.readline())
            with sync.connect(*genie.address) as client:
                with ThreadPoolExecutor(1) as threads:
                    candidacy = client.elect("leader/killed")
                    successor = threads.submit(candidacy.__enter__)
                    while client.inspect(resource="leader/killed").queue_total == 0:
                        pass
                    assert client.inspect(resource="leader/killed").holders[0].fence == fence, "is extended"
                    leader.kill()
                    assert successor.result(WAIT_S).fence > fence
                candidacy.__exit__(None, None, None)
        finally:
            leader.kill()


def test_a_thread_learns_of_the_loss_from_the_event_and_at_the_end_of_the_block(genie: Genie) -> None:
    with sync.connect(*genie.address) as client, sync.connect(*genie.address) as other:
        with pytest.raises(LockLost), client.elect("leader/thread", note="host a") as leadership:
            assert client.inspect(resource="leader/thread").holders[0].note == "host a"
            other.release(leadership.id)
            assert leadership.lost.wait(WAIT_S)
            assert not leadership.held
        with other.elect("leader/thread") as successor:
            assert successor.fence > leadership.fence
