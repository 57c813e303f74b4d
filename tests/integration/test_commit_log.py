"""What a standing connection hides: Redis lost data or was replaced, and the leader finds out before it acknowledges a commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from genie.core import Release
from genie.storage.store import Batch, LeadershipLost
from redises.group import until
from support.processes.servers import WAIT_S, Redis, running_redis
from support.storage.relay import Rule, error, relay
from support.storage.stores import NAME, Locks, batches, commit, locks, soon, stored

META, LOG = f"{{{NAME}}}:meta", f"{{{NAME}}}:log"


@pytest.fixture(scope="module")
def plain() -> Iterator[Redis]:
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _empty(plain: Redis) -> None:
    plain.call("FLUSHALL")
    plain.call("CONFIG", "SET", "maxmemory", "0")


@pytest.fixture(autouse=True)
def _long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are sent again only for the cause that the test injects, not because the machine is slow."""
    monkeypatch.setattr("genie.storage.redis.commit.COMMIT_TIMEOUT_S", WAIT_S / 2)


async def held_by_the_next_leader(redis: Redis) -> set[int]:
    """Return the locks that another node loads when it takes over."""
    following = Locks(redis.url)
    state = await following.open()
    await following.store.close()
    return set(state.manager.table.held)


def everything(redis: Redis) -> None:
    redis.call("FLUSHALL")


def meta(redis: Redis) -> None:
    redis.call("DEL", META)


def log(redis: Redis) -> None:
    redis.call("DEL", LOG)


def tail_of_the_log(redis: Redis) -> None:
    redis.call("RENAME", "early", LOG)


LOSSES = [everything, meta, log, tail_of_the_log]


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
async def test_a_loss_is_restored_before_the_next_commit_is_acknowledged(
    plain: Redis, lose: Callable[[Redis], None]
) -> None:
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        plain.call("COPY", LOG, "early")
        await soon(client.lock("b"))
        connection = client.store._writer.connection
        lose(plain)
        await soon(client.lock("c"))
        assert client.store._writer.connection is connection
        assert stored(plain) == {1, 2, 3}
        await soon(client.lock("d"))
        await client.store.resign()
    assert await held_by_the_next_leader(plain) == {1, 2, 3, 4}


async def test_a_primary_that_was_demoted_resynchronized_and_promoted_again_is_found_out(plain: Redis) -> None:
    """The connection stands all the time, and the log of the other Redis continues that of the leader up to a moment."""
    with running_redis("--repl-diskless-sync-delay", "0") as other:

        async def follows(replica: Redis, of: Redis) -> None:
            replica.call("REPLICAOF", "127.0.0.1", f"{of.port}")

            async def in_sync() -> bool:
                found = replica.call("INFO", "replication")
                return bool(found["master_link_status"] == "up")

            await until("the replica follows", in_sync)
            replica.call("REPLICAOF", "NO", "ONE")

        plain.call("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        async with locks(plain.url) as client:
            await soon(client.lock("a"))
            await follows(other, plain)
            assert stored(other) == {1}
            await soon(client.lock("b"))
            connection = client.store._writer.connection
            await follows(plain, other)
            assert stored(plain) == {1}, "it has lost an acknowledged commit"
            await soon(client.lock("c"))
            assert client.store._writer.connection is connection
            assert stored(plain) == {1, 2, 3}
            await client.store.resign()
        assert await held_by_the_next_leader(plain) == {1, 2, 3}


async def test_a_log_that_was_replaced_by_an_equal_one_is_continued(plain: Redis) -> None:
    """EXEC replies nil, as after a resynchronization. The log still ends with the last batch, so this batch is sent again."""
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        plain.call("COPY", LOG, "early")
        tail_of_the_log(plain)
        await soon(client.lock("b"))
        assert between.names().count("XADD") == 3  # the second is rejected
        assert (stored(plain), batches(plain)) == ({1, 2}, 2)


async def test_a_takeover_is_found_by_the_next_commit(plain: Redis) -> None:
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        assert await held_by_the_next_leader(plain) == {1}
        with pytest.raises(LeadershipLost, match="has another leader"):
            await soon(client.lock("b"))
        assert stored(plain) == {1}


@pytest.mark.parametrize("lose", [None, *LOSSES], ids=lambda lose: "nothing" if lose is None else lose.__name__)
async def test_after_a_rejected_watch_the_next_commit_compares_first(
    plain: Redis, lose: Callable[[Redis], None] | None
) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        plain.call("COPY", LOG, "early")
        between.say("WATCH", error("ERR no"))
        await soon(client.lock("b"))
        if lose is not None:
            lose(plain)
        await soon(client.lock("c"))
        assert stored(plain) == {1, 2, 3}
        if lose is None:
            assert between.names().count("XADD") == batches(plain) == 3


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
async def test_a_loss_is_restored_while_redis_is_out_of_memory(plain: Redis, lose: Callable[[Redis], None]) -> None:
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        plain.call("COPY", LOG, "early")
        plain.call("CONFIG", "SET", "maxmemory", "1")
        await soon(client.lock("b"))
        assert client.store.full
        assert (stored(plain), batches(plain)) == ({1, 2}, 2)
        lose(plain)
        await soon(client.lock("c"))
        assert stored(plain) == {1, 2, 3}
        plain.call("CONFIG", "SET", "maxmemory", "0")
        await soon(client.lock("d"))
        assert not client.store.full
        await client.store.resign()
    assert await held_by_the_next_leader(plain) == {1, 2, 3, 4}


@pytest.mark.parametrize("position", ["before", "after"])
async def test_while_redis_is_out_of_memory_a_commit_whose_reply_is_lost_is_stored_once(
    plain: Redis, position: str
) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        plain.call("CONFIG", "SET", "maxmemory", "1")
        lost = between.rule(Rule("EVAL", cut=position))
        await soon(client.lock("b"))
        assert lost.met.is_set()
        assert (stored(plain), batches(plain)) == ({1, 2}, 2)


async def test_a_release_is_stored_while_redis_is_out_of_memory(plain: Redis) -> None:
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        plain.call("CONFIG", "SET", "maxmemory", "1")
        request = client.manager.table.held[1]
        client.manager.step(Release(1), 1)
        await commit(client.store, Batch({1: request}, client.manager.next_id, client.manager.next_fence, 1))
        assert stored(plain) == set()
    plain.call("CONFIG", "SET", "maxmemory", "0")
    assert await held_by_the_next_leader(plain) == set()
