"""The follower carries decisions out: it checks the primary last, and leaves time to candidates of a higher rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.election import LeadershipBalancer
from genie.storage.redis.follower import Follower
from genie.storage.redis.keyspace import Keyspace, LeaderEpoch, Meta
from genie.storage.redis.log import BatchCommitted, EpochHistory, EpochStarted, LogEntry, LogReader, Position
from genie.storage.redis.replica import LazyReplica, PriorLeadership, Snapshot
from genie.storage.store import Batch, Node, StateMachine

EPOCH = LeaderEpoch(7, "nonce", "records")
OWN = Node(listening="here", address="own", lease_ms=3_000, boot="today", host="machine")
BEFORE = Node(listening="here", address="own", lease_ms=3_000, boot="today", host="machine")
"""This node, before its restart."""
NEVER = 1_000_000


@dataclass
class ScriptedKeyspace:
    """A keyspace with a fixed `meta`, whose primary is replaced after `primary_for` reads."""

    meta: Meta | None
    primary_for: int = NEVER
    name: str = "a"
    primary_may_change: bool = True
    reads: int = 0
    discoverable: bool = True
    furthest_rival: Position = (0, 0)
    done: list[str] = field(default_factory=list)
    history: EpochHistory | None = None
    """The lineage that the next leader finds; None: another node is always faster."""
    epoch: LeaderEpoch = EPOCH

    async def read(self) -> Meta | None:
        self.reads += 1
        return self.meta

    async def register_candidate(self) -> bool:
        return False

    async def publish_position_and_compare(self, position: Position) -> bool:
        return self.furthest_rival > position

    async def is_discoverable(self) -> bool:
        return self.discoverable

    async def request_transfer(self, *_: Any) -> None:
        self.done.append("requested")

    async def verify(self) -> None:
        if self.reads >= self.primary_for:
            raise RedisFailure("127.0.0.1:6379 is no longer the primary")

    async def acquire_leadership(self, *_: Any, **__: Any) -> Position | None:
        self.done.append("acquired")
        return None if self.history is None else self.history.position

    async def restore_snapshot(self, *_: Any) -> None:
        self.done.append("restored")

    async def scan_records(self) -> AsyncIterator[dict[bytes, bytes]]:
        self.done.append("loaded")
        yield {}


def led_by(node: Node | None, epoch: int = 7, index: int = 3) -> Meta:
    return Meta(LeaderEpoch(epoch, "nonce", "records"), node, index, Batch(), ((0, 0),))


def follower_of(
    keyspace: ScriptedKeyspace, *, balancer: LeadershipBalancer | None = None, led: PriorLeadership | None = None
) -> Follower:
    """A follower that knew a leader at this Redis, and has seen no sign of life for longer than any lease."""
    made = newcomer_to(keyspace, balancer=balancer, led=led)
    made._candidacy.has_seen_leader = True
    return made


def newcomer_to(
    keyspace: ScriptedKeyspace, *, balancer: LeadershipBalancer | None = None, led: PriorLeadership | None = None
) -> Follower:
    """A follower that has seen no leader at all, for as long."""
    reader = LogReader(cast("Any", None), "log")
    if keyspace.meta is not None:
        reader.seek(keyspace.meta.history)
    balancer = balancer or LeadershipBalancer()
    made = Follower(cast("Keyspace", keyspace), reader, OWN, balancer, lambda _: None, led)
    made._candidacy.last_sign_of_life -= 3600
    made._candidacy.empty_since = made._candidacy.last_sign_of_life
    return made


async def test_the_primary_is_verified_after_the_election_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    balancer, keyspace = LeadershipBalancer(), ScriptedKeyspace(led_by(Node(address="gone")), primary_for=2)
    balancer.set_leader("b", "own")
    monkeypatch.setattr("genie.storage.redis.election.DELAY_PER_NAMESPACE_S", 0.001)
    follower = follower_of(keyspace, balancer=balancer)
    follower._candidacy.expired = EPOCH
    with pytest.raises(RedisFailure):
        await follower._step()
    assert keyspace.reads == 2
    assert not keyspace.done


@pytest.mark.parametrize("meta", [led_by(None), led_by(BEFORE)])
async def test_without_a_wait_leadership_is_acquired_only_from_a_verified_primary(meta: Meta) -> None:
    keyspace = ScriptedKeyspace(meta, primary_for=0)
    with pytest.raises(RedisFailure):
        await follower_of(keyspace)._step()
    assert not keyspace.done


@pytest.mark.parametrize("led", [None, PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 1))), Batch()), (7, 1))])
async def test_an_empty_namespace_is_acquired_only_from_a_verified_primary(led: PriorLeadership | None) -> None:
    keyspace = ScriptedKeyspace(None, primary_for=0)
    with pytest.raises(RedisFailure):
        await follower_of(keyspace, led=led)._step()
    assert not keyspace.done
    keyspace.primary_for = NEVER
    await follower_of(keyspace, led=led)._step()
    assert keyspace.done == ["acquired" if led is None else "restored"]


@pytest.mark.parametrize("node", [None, BEFORE])
@pytest.mark.parametrize("seen", [(7, 4), (8, 0), (8, 2)])
async def test_the_leader_of_commits_that_redis_lacks_has_a_lease_to_return(
    node: Node | None, seen: tuple[int, int]
) -> None:
    """Redis names no leader, or this very node: but it rolled back behind what was read of a leader who may live."""
    keyspace = ScriptedKeyspace(led_by(node))
    follower = follower_of(keyspace)
    follower._reader.seek(EpochHistory(((0, 0), (7, 3), seen) if seen[0] > 7 else ((0, 0), seen)))
    assert await follower._step() is None
    assert not keyspace.done, "however long ago its last sign of life was: it has to find this Redis first"
    follower._candidacy.last_sign_of_life -= OWN.lease_ms / 1000
    await follower._step()
    assert keyspace.done == ["acquired"]


@pytest.mark.parametrize("node", [None, BEFORE])
async def test_a_vacant_namespace_is_acquired_at_once_where_redis_has_everything(node: Node | None) -> None:
    keyspace = ScriptedKeyspace(led_by(node))
    await follower_of(keyspace)._step()
    assert keyspace.done == ["acquired"]


@pytest.mark.parametrize(
    ("seen", "then"),
    [
        (((0, 0), (7, 3)), []),  # the batch in flight was never seen again
        (((0, 0), (7, 4), (8, 0)), ["loaded"]),  # it was on the old primary, but never acknowledged: it is dropped
        (((0, 0), (7, 3), (8, 5)), ["restored"]),  # what others acknowledged since is not lost with the Redis that had it
    ],
)  # fmt: skip
async def test_what_redis_lacks_is_restored_if_it_may_have_been_acknowledged(
    seen: tuple[Position, ...], then: list[str]
) -> None:
    """Redis is back where this node was as the leader: at its last acknowledged batch, with another one in flight."""
    keyspace = ScriptedKeyspace(led_by(None), history=EpochHistory(((0, 0), (7, 3))))
    led = PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 4))), Batch()), (7, 3))
    follower = follower_of(keyspace, led=led)
    follower._replica.discard_own_leadership_state()  # others have led since
    follower._reader.seek(EpochHistory(seen))
    follower._replica.lazy = LazyReplica(StateMachine())
    assert keyspace.meta is not None
    await follower._acquire(keyspace.meta, unmoved=False)
    assert keyspace.done == ["acquired", *then]


async def test_a_newcomer_leaves_time_to_a_leader_that_a_failover_has_hidden() -> None:
    """This may be a new primary, which names no leader because it lacks who has taken over on the old one."""
    keyspace = ScriptedKeyspace(led_by(None))
    follower = newcomer_to(keyspace)
    for _ in range(3):
        assert await follower._step() is None
    assert keyspace.done == ["loaded"]
    loop = asyncio.get_running_loop()
    follower._candidacy.last_sign_of_life = loop.time() - OWN.lease_ms / 1000 - 1
    assert await follower._step() is None
    assert keyspace.done == ["loaded"], "candidates that have replicated more come first"
    follower._candidacy.last_sign_of_life = loop.time() - OWN.lease_ms / 1000 - 2
    await follower._step()
    assert keyspace.done == ["loaded", "acquired"]


async def test_an_earlier_leader_is_a_newcomer_too_where_the_primary_may_change() -> None:
    """Others may have led since it was deposed, or has resigned."""
    led = PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 3))), Batch()), (7, 3))
    keyspace = ScriptedKeyspace(led_by(BEFORE))
    assert not newcomer_to(keyspace, led=led)._candidacy.has_seen_leader
    keyspace.primary_may_change = False
    assert newcomer_to(keyspace, led=led)._candidacy.has_seen_leader


async def test_a_follower_that_lost_its_redis_is_a_newcomer_to_the_next() -> None:
    follower = follower_of(ScriptedKeyspace(led_by(Node(address="other"))))
    follower.on_store_failure()
    assert not follower._candidacy.has_seen_leader


@pytest.mark.parametrize(("index", "alive"), [(3, False), (4, True)])
async def test_only_a_new_entry_proves_that_a_leader_lives(
    monkeypatch: pytest.MonkeyPatch, index: int, alive: bool
) -> None:
    """An entry that was in the log at the first look may have come with the state of another Redis."""
    keyspace = ScriptedKeyspace(led_by(Node(address="other"), index=3))
    assert keyspace.meta is not None
    follower = newcomer_to(keyspace)
    found: list[list[LogEntry]] = [
        [BatchCommitted((7, index), {}, b"0 0 1 1", resigned=False)],
        [EpochStarted((8, 0), (7, index), None)],
    ]

    async def read(_wait_ms: int | None) -> list[LogEntry]:
        if len(found) == 1:
            assert follower._candidacy.has_seen_leader == alive
        return found.pop(0)

    monkeypatch.setattr(follower._reader, "read", read)
    await follower._tail_log(keyspace.meta, Node(address="other"))
    assert not found


async def test_a_silent_log_expires_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    keyspace = ScriptedKeyspace(led_by(Node(address="other")))
    follower = follower_of(keyspace)
    follower._replica.lazy = LazyReplica(StateMachine())

    async def read(wait_ms: int | None) -> list[LogEntry]:
        assert wait_ms is None, "the lease is over: only what is there already counts"
        return []

    monkeypatch.setattr(follower._reader, "read", read)
    await follower._step()
    assert follower._candidacy.expired == EPOCH
    await follower._step()
    assert keyspace.done == ["acquired"]
    assert follower._candidacy.expired is None


@pytest.mark.parametrize("discoverable", [True, False])
async def test_a_node_that_can_not_find_the_primary_requests_no_transfer(discoverable: bool) -> None:
    balancer = LeadershipBalancer()
    for name in "abc":
        balancer.set_leader(name, "other")
    (name,) = {balancer.namespace_to_request("own")}
    assert name is not None
    keyspace = ScriptedKeyspace(led_by(Node(address="other")), name=name, discoverable=discoverable)
    await follower_of(keyspace, balancer=balancer)._request_transfer()
    assert keyspace.done == ["requested"] * discoverable


@pytest.mark.parametrize("where", ["empty", "vacant", "rolled back", "lease expired"])
async def test_a_candidate_leaves_leadership_to_one_that_has_replicated_more(where: str) -> None:
    keyspace = ScriptedKeyspace({"empty": None, "vacant": led_by(None)}.get(where, led_by(Node(address="gone"))))
    follower = newcomer_to(keyspace)
    keyspace.furthest_rival = (9, 9)
    if keyspace.meta is not None:
        follower._replica.lazy = LazyReplica(StateMachine())
        follower._candidacy.rollback = keyspace.meta.epoch, keyspace.meta.index
    if where == "rolled back":
        follower._reader.seek(EpochHistory(((0, 0), (7, 5))))

    async def step() -> None:
        if where == "lease expired":
            follower._candidacy.expired = EPOCH
        await follower._step()

    await step()
    assert not keyspace.done
    keyspace.furthest_rival = (0, 0)
    await step()
    assert keyspace.done == ["acquired"]
