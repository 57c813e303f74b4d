"""The follower executes decisions: it verifies the primary last, and waits for candidates of a higher rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
import structlog
from structlog.testing import capture_logs

from genie.core import LockManager, Request, State
from genie.core.lock_table import LockTable
from genie.core.model import details_of
from genie.roles import FollowerRole, Following, StoreOutage, StoreUnavailable
from genie.storage.redis import replica as replica_module
from genie.storage.redis.connection import UNKNOWN_RUN, RedisFailure, RedisRun
from genie.storage.redis.election import LeadershipBalancer, rank_delay_s
from genie.storage.redis.follower import Follower
from genie.storage.redis.keyspace import Checkpoint, Keyspace, LeaderEpoch, Meta
from genie.storage.redis.log import BatchCommitted, EpochHistory, EpochStarted, LogEntry, LogReader, Position
from genie.storage.redis.outage import OutageLog
from genie.storage.redis.records import encode_batch, encode_changes
from genie.storage.redis.replica import LazyReplica, PriorLeadership, Snapshot
from genie.storage.redis.url import Address
from genie.storage.store import Batch, Change, Node, StateMachine
from simulator.invariants import check

EPOCH = LeaderEpoch(7, "nonce", "state")
OWN = Node(listening="here", address="own", lease_ms=3_000, boot="today", host="machine")
BEFORE = Node(listening="here", address="own", lease_ms=3_000, boot="today", host="machine")
"""The server `OWN` before its restart."""
NEVER = 1_000_000


@dataclass
class ScriptedKeyspace:
    """A keyspace with a fixed `meta`, whose primary is replaced after `primary_for_reads` reads."""

    meta: Meta | None
    primary_for_reads: int = NEVER
    name: str = "a"
    may_change: bool = True
    reads: int = 0
    discoverable: bool = True
    latest_rival_position: Position = (0, 0)
    stall_s: float = 0.0
    """How far the publication of a position moves the clock."""
    calls: list[str] = field(default_factory=list)
    log_end: str = ""
    log_ends: list[str] = field(default_factory=list)
    """The values of `log_end` after the next reads."""
    history: EpochHistory | None = None
    """The stored lineage when leadership is acquired; None: another node is always faster."""
    epoch: LeaderEpoch = EPOCH
    address: Address | None = None
    run: RedisRun = UNKNOWN_RUN

    @property
    def primary(self) -> ScriptedKeyspace:
        return self

    async def read(self) -> Meta | None:
        self.reads += 1
        if self.log_ends:
            self.log_end = self.log_ends.pop(0)
        return self.meta

    async def register_candidate(self) -> bool:
        return False

    async def publish_position_and_compare(self, position: Position) -> bool:
        if self.stall_s:
            loop, stopped_at = asyncio.get_running_loop(), asyncio.get_running_loop().time()
            loop.time = lambda: stopped_at + self.stall_s  # type: ignore[method-assign]
        return self.latest_rival_position > position

    async def is_discoverable(self) -> bool:
        return self.discoverable

    async def request_transfer(self, *_: Any) -> None:
        self.calls.append("requested")

    async def verify(self) -> None:
        if self.reads >= self.primary_for_reads:
            raise RedisFailure("127.0.0.1:6379 is no longer the primary")

    def confirm_acquisition(self, _: Meta | None) -> bool:
        return False

    async def acquire_leadership(self, *_: Any) -> bool:
        self.calls.append("acquired")
        return self.history is not None

    async def restore_snapshot(self, *_: Any) -> None:
        self.calls.append("restored")

    async def collect_garbage(self) -> None:
        raise RedisFailure("the connection to 127.0.0.1:6379 ended: closed")

    async def scan_records(self) -> AsyncIterator[dict[bytes, bytes]]:
        self.calls.append("loaded")
        yield {}


def outage_log() -> OutageLog:
    return OutageLog(structlog.get_logger())


def led_by(node: Node | None, epoch: int = 7, index: int = 3) -> Meta:
    return Meta(
        LeaderEpoch(epoch, "nonce", "state"), node, (epoch, index), Checkpoint((epoch, index), Batch()), ((0, 0),)
    )


def follower_of(
    keyspace: ScriptedKeyspace, *, balancer: LeadershipBalancer | None = None, led: PriorLeadership | None = None
) -> Follower:
    """Return a follower that has seen a leader at this Redis, but no sign of life for longer than any lease."""
    follower = unconfirmed_follower_of(keyspace, balancer=balancer, led=led)
    follower._candidacy.has_seen_leader = True
    return follower


def unconfirmed_follower_of(
    keyspace: ScriptedKeyspace, *, balancer: LeadershipBalancer | None = None, led: PriorLeadership | None = None
) -> Follower:
    """Return a follower that has seen no leader at this Redis, for longer than any lease."""
    reader = LogReader(cast("Any", None), "log")
    if keyspace.meta is not None:
        reader.seek(keyspace.meta.history)
    balancer = balancer or LeadershipBalancer()
    follower = Follower(cast("Keyspace", keyspace), reader, OWN, balancer, outage_log(), lambda _: None, led)
    follower._candidacy.last_sign_of_life -= 3600
    follower._candidacy.empty_since = follower._candidacy.last_sign_of_life
    return follower


async def test_the_primary_is_verified_after_the_election_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    balancer, keyspace = LeadershipBalancer(), ScriptedKeyspace(led_by(Node(address="gone")), primary_for_reads=2)
    balancer.set_leader("b", "own")
    monkeypatch.setattr("genie.storage.redis.election.DELAY_PER_NAMESPACE_S", 0.001)
    follower = follower_of(keyspace, balancer=balancer)
    follower._candidacy.expired_epoch = EPOCH
    with pytest.raises(RedisFailure):
        await follower._step()
    assert keyspace.reads == 2
    assert not keyspace.calls


@pytest.mark.parametrize("meta", [led_by(None), led_by(BEFORE)])
async def test_without_a_wait_leadership_is_acquired_only_from_a_verified_primary(meta: Meta) -> None:
    keyspace = ScriptedKeyspace(meta, primary_for_reads=0)
    follower = follower_of(keyspace)
    follower._replica.lazy = LazyReplica(StateMachine())
    with pytest.raises(RedisFailure):
        await follower._step()
    assert not keyspace.calls


@pytest.mark.parametrize("led", [None, PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 1))), Batch()), (7, 1))])
async def test_an_empty_namespace_is_acquired_only_from_a_verified_primary(led: PriorLeadership | None) -> None:
    keyspace = ScriptedKeyspace(None, primary_for_reads=0)
    with pytest.raises(RedisFailure):
        await follower_of(keyspace, led=led)._step()
    assert not keyspace.calls
    keyspace.primary_for_reads = NEVER
    await follower_of(keyspace, led=led)._step()
    assert keyspace.calls == ["acquired" if led is None else "restored"]


@pytest.mark.parametrize("led", [None, PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 1))), Batch()), (7, 1))])
async def test_a_log_that_grows_without_metadata_shows_that_a_leader_is_alive(led: PriorLeadership | None) -> None:
    keyspace = ScriptedKeyspace(None)
    follower = follower_of(keyspace, led=led)
    for number in range(1, 4):
        keyspace.log_ends = [f"7-{number}"]
        assert await follower._step() is None
        assert follower._candidacy.empty_since is not None
        follower._candidacy.empty_since -= 3600
    assert not keyspace.calls
    await follower._step()
    assert keyspace.calls == ["acquired" if led is None else "restored"]


async def test_a_log_that_grows_during_the_election_delay_shows_that_a_leader_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("genie.storage.redis.election.DELAY_PER_NAMESPACE_S", 0.001)
    balancer, keyspace = LeadershipBalancer(), ScriptedKeyspace(None, log_ends=["", "7-1"])
    balancer.set_leader("b", "own")
    assert await follower_of(keyspace, balancer=balancer)._step() is None
    assert (keyspace.reads, keyspace.calls) == (2, [])


@pytest.mark.parametrize("node", [None, BEFORE])
@pytest.mark.parametrize("replicated", [(7, 4), (8, 0), (8, 2)])
async def test_the_leader_of_commits_that_redis_lacks_has_a_lease_to_return(
    node: Node | None, replicated: tuple[int, int]
) -> None:
    """Redis has no leader stored, or this node, but it rolled back, and the leader of the lost commits may be alive."""
    keyspace = ScriptedKeyspace(led_by(node))
    follower = follower_of(keyspace)
    follower._reader.seek(EpochHistory(((0, 0), (7, 3), replicated) if replicated[0] > 7 else ((0, 0), replicated)))
    assert await follower._step() is None
    assert not keyspace.calls, (
        "the lease counts from when the rollback was observed: the leader has to find this Redis first"
    )
    follower._candidacy.last_sign_of_life -= OWN.lease_ms / 1000
    await follower._step()
    assert keyspace.calls == ["acquired"]


@pytest.mark.parametrize("node", [None, BEFORE])
async def test_a_vacant_namespace_is_acquired_at_once_where_redis_has_everything(node: Node | None) -> None:
    keyspace = ScriptedKeyspace(led_by(node))
    follower = follower_of(keyspace)
    await follower._step()
    assert keyspace.calls == ["loaded"], "a node must not lead with records that it cannot decode"
    await follower._step()
    assert keyspace.calls == ["loaded", "acquired"]


async def test_a_leader_whose_takeover_redis_has_lost_in_a_restart_has_time_to_return() -> None:
    """Redis has no leader stored, because the last one that it knows has resigned."""
    keyspace = ScriptedKeyspace(led_by(None))
    keyspace.may_change = False
    follower = follower_of(keyspace)
    follower._replica.lazy = LazyReplica(StateMachine())
    keyspace.run = RedisRun("restarted", asyncio.get_running_loop().time())
    assert await follower._step() is None
    assert not keyspace.calls
    assert follower._candidacy.restarted_at == keyspace.run.started_at
    follower._candidacy.restarted_at -= OWN.lease_ms / 1000
    await follower._step()
    assert not keyspace.calls, "candidates of a higher rank may have more commits"
    follower._candidacy.restarted_at -= rank_delay_s(keyspace.meta, follower._candidacy, follower._replica)
    await follower._step()
    assert keyspace.calls == ["acquired"]


@pytest.mark.parametrize(
    ("replicated", "then"),
    [
        (((0, 0), (7, 3)), []),  # the batch in flight was not seen again
        (((0, 0), (7, 4), (8, 0)), ["loaded"]),  # it was on the old primary, but not acknowledged: it is dropped
        (((0, 0), (7, 3), (8, 5)), ["restored"]),  # commits that others acknowledged since are restored
    ],
)  # fmt: skip
async def test_commits_that_redis_lacks_are_restored_if_they_may_have_been_acknowledged(
    replicated: tuple[Position, ...], then: list[str]
) -> None:
    """Redis rolled back to the last batch that this node acknowledged as the leader, when another one was in flight."""
    keyspace = ScriptedKeyspace(led_by(None), history=EpochHistory(((0, 0), (7, 3))))
    led = PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 4))), Batch()), (7, 3))
    follower = follower_of(keyspace, led=led)
    follower._replica.discard_own_leadership_state()  # others have led since
    follower._reader.seek(EpochHistory(replicated))
    follower._replica.lazy = LazyReplica(StateMachine())
    assert keyspace.meta is not None
    await follower._acquire(keyspace.meta)
    assert keyspace.calls == ["acquired", *then]


async def test_a_failed_acquisition_shows_that_a_leader_is_alive() -> None:
    """The candidate may have read the entries of the new leader before, so that it sees none of them later."""
    keyspace = ScriptedKeyspace(led_by(None))
    follower = follower_of(keyspace)
    now = asyncio.get_running_loop().time()
    assert await follower._acquire(keyspace.meta) is None
    assert keyspace.calls == ["acquired"]
    assert follower._candidacy.last_sign_of_life >= now


async def test_a_node_without_a_seen_leader_waits_for_candidates_of_a_higher_rank() -> None:
    """The Redis may be a new primary, that lacks the take-over of a leader at the old one."""
    keyspace = ScriptedKeyspace(led_by(None))
    follower = unconfirmed_follower_of(keyspace)
    for _ in range(3):
        assert await follower._step() is None
    assert keyspace.calls == ["loaded"]
    loop = asyncio.get_running_loop()
    follower._candidacy.last_sign_of_life = loop.time() - OWN.lease_ms / 1000 - 1
    assert await follower._step() is None
    assert keyspace.calls == ["loaded"], "candidates that have replicated more have a higher rank"
    follower._candidacy.last_sign_of_life = loop.time() - OWN.lease_ms / 1000 - 2
    await follower._step()
    assert keyspace.calls == ["loaded", "acquired"]


async def test_a_former_leader_has_seen_no_leader_if_the_primary_may_change() -> None:
    """Others may have led since it lost leadership."""
    led = PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 3))), Batch()), (7, 3))
    keyspace = ScriptedKeyspace(led_by(BEFORE))
    assert not unconfirmed_follower_of(keyspace, led=led)._candidacy.has_seen_leader
    keyspace.may_change = False
    assert unconfirmed_follower_of(keyspace, led=led)._candidacy.has_seen_leader


async def test_after_a_store_failure_no_leader_was_seen() -> None:
    follower = follower_of(ScriptedKeyspace(led_by(Node(address="other"))))
    follower.on_store_failure(StoreOutage(0.0, "gone"))
    assert not follower._candidacy.has_seen_leader


@pytest.mark.parametrize(("index", "alive"), [(3, False), (4, True)])
async def test_only_a_new_log_entry_proves_that_a_leader_is_alive(
    monkeypatch: pytest.MonkeyPatch, index: int, alive: bool
) -> None:
    """An entry that is not later than `meta` may have been written at another Redis."""
    keyspace = ScriptedKeyspace(led_by(Node(address="other"), index=3))
    assert keyspace.meta is not None
    follower = unconfirmed_follower_of(keyspace)
    batches: list[list[LogEntry]] = [
        [BatchCommitted((7, index), b"0 1 1", resigned=False)],
        [EpochStarted((8, 0), (7, index), None)],
    ]

    async def read(_wait_ms: int | None) -> list[LogEntry]:
        if len(batches) == 1:
            assert follower._candidacy.has_seen_leader == alive
        return batches.pop(0)

    monkeypatch.setattr(follower._reader, "read", read)
    await follower._tail_log(keyspace.meta, Node(address="other"))
    assert not batches


async def test_a_silent_log_expires_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    keyspace = ScriptedKeyspace(led_by(Node(address="other")))
    follower = follower_of(keyspace)
    follower._replica.lazy = LazyReplica(StateMachine())

    async def read(wait_ms: int | None) -> list[LogEntry]:
        assert wait_ms is None, "the lease has expired: the read must not block"
        return []

    monkeypatch.setattr(follower._reader, "read", read)
    await follower._step()
    assert follower._candidacy.expired_epoch == EPOCH
    await follower._step()
    assert keyspace.calls == ["acquired"]
    assert follower._candidacy.expired_epoch is None


@pytest.mark.parametrize("discoverable", [True, False])
async def test_a_node_that_can_not_find_the_primary_requests_no_transfer(discoverable: bool) -> None:
    balancer = LeadershipBalancer()
    for name in "abc":
        balancer.set_leader(name, "other")
    (name,) = {balancer.namespace_to_request("own")}
    assert name is not None
    keyspace = ScriptedKeyspace(led_by(Node(address="other")), name=name, discoverable=discoverable)
    await follower_of(keyspace, balancer=balancer)._request_transfer()
    assert keyspace.calls == ["requested"] * discoverable


@pytest.mark.parametrize("situation", ["empty", "vacant", "rolled back", "lease expired"])
async def test_a_candidate_yields_to_one_that_has_replicated_more(situation: str) -> None:
    keyspace = ScriptedKeyspace({"empty": None, "vacant": led_by(None)}.get(situation, led_by(Node(address="gone"))))
    follower = unconfirmed_follower_of(keyspace)
    keyspace.latest_rival_position = (9, 9)
    if keyspace.meta is not None:
        follower._replica.lazy = LazyReplica(StateMachine())
        follower._candidacy.rollback = keyspace.meta.epoch, keyspace.meta.position
    if situation == "rolled back":
        follower._reader.seek(EpochHistory(((0, 0), (7, 5))))

    async def step() -> None:
        if situation == "lease expired":
            follower._candidacy.expired_epoch = EPOCH
        await follower._step()

    await step()
    assert not keyspace.calls
    keyspace.latest_rival_position = (0, 0)
    await step()
    assert keyspace.calls == ["acquired"]


@pytest.mark.parametrize("situation", ["empty", "vacant", "lease expired"])
async def test_a_candidate_waits_again_if_redis_did_not_answer(situation: str) -> None:
    """A candidate with a later position could not connect in that time."""
    keyspace = ScriptedKeyspace({"empty": None, "vacant": led_by(None)}.get(situation, led_by(Node(address="gone"))))
    follower = unconfirmed_follower_of(keyspace)
    if keyspace.meta is not None:
        follower._replica.lazy = LazyReplica(StateMachine())
        follower._candidacy.rollback = keyspace.meta.epoch, keyspace.meta.position
    if situation == "lease expired":
        follower._candidacy.expired_epoch = EPOCH
    keyspace.stall_s = 3600.0
    await follower._step()
    assert not keyspace.calls
    assert follower._candidacy.last_sign_of_life == asyncio.get_running_loop().time()
    assert follower._candidacy.empty_since is None


async def test_a_node_that_has_taken_over_leads_although_it_can_not_delete_garbage() -> None:
    """Following again would take a lease."""
    keyspace = ScriptedKeyspace(led_by(None), history=EpochHistory(((0, 0), (7, 3))))
    balancer = LeadershipBalancer()
    follower = follower_of(keyspace, balancer=balancer)
    with capture_logs() as lines:
        assert await follower.run() is follower.acquired_state
    assert keyspace.calls == ["loaded", "acquired"]
    assert balancer.count("own") == 1
    (line,) = [line for line in lines if line["log_level"] == "warning"]
    assert line["reason"] == "the connection to 127.0.0.1:6379 ended: closed"


async def test_a_follower_reports_when_its_replica_has_caught_up() -> None:
    """Not before it has loaded the state, and not after an outage before it has read the rest of the log."""
    keyspace = ScriptedKeyspace(led_by(Node(address="other")))
    roles: list[FollowerRole] = []
    reader = ScriptedReader()
    reader.seek(led_by(None).history)
    balancer = LeadershipBalancer()
    follower = Follower(cast("Keyspace", keyspace), reader, OWN, balancer, outage_log(), roles.append)
    await follower._step()
    assert roles == [Following("other", caught_up=False), Following("other", caught_up=True)]
    outage = StoreOutage(0.0, "gone")
    follower.on_store_failure(outage)
    await follower._observe(await follower._keyspace.read())
    await follower._read_log(None)
    assert roles[2:] == [
        StoreUnavailable(outage),
        Following("other", caught_up=False),
        Following("other", caught_up=True),
    ]


@pytest.mark.parametrize("failure", ["unreachable", "empty"])
async def test_a_follower_whose_load_fails_keeps_the_commits_that_it_has_read(failure: str) -> None:
    """Redis has lost them, the leader has restored them, and Redis loses them again while the follower loads them."""
    keyspace = ScriptedKeyspace(led_by(Node(address="other"), epoch=9))
    roles: list[FollowerRole] = []
    reader = ScriptedReader()
    read_history = led_by(None).history
    reader.seek(read_history)
    follower = Follower(cast("Keyspace", keyspace), reader, OWN, LeadershipBalancer(), outage_log(), roles.append)
    follower._leader = "other"
    replica = follower._replica.lazy = LazyReplica(StateMachine())

    async def scan_records() -> AsyncIterator[dict[bytes, bytes]]:
        assert reader.history != read_history, "loading moves the reader"
        keyspace.meta = None
        if failure == "unreachable":
            raise RedisFailure("the connection to 127.0.0.1:6379 ended: closed")
        yield {}

    keyspace.scan_records = scan_records  # type: ignore[method-assign]
    with suppress(RedisFailure):
        await follower._load_replica()
    assert follower._replica.lazy is replica
    assert follower._replica.history is read_history
    follower._report_role()
    assert roles == [Following("other", caught_up=False)]


async def test_a_takeover_that_failed_does_not_make_a_later_load_drop_the_replica() -> None:
    """This node has acquired leadership, could not load the state, and follows another leader now."""
    keyspace = ScriptedKeyspace(led_by(Node(address="other"), epoch=9))
    keyspace.history = EpochHistory(((0, 0), (7, 3), (8, 0)))
    reader = ScriptedReader()
    follower = Follower(cast("Keyspace", keyspace), reader, OWN, LeadershipBalancer(), outage_log(), lambda _: None)
    is_reachable = False

    async def scan_records() -> AsyncIterator[dict[bytes, bytes]]:
        if not is_reachable:
            raise RedisFailure("the connection to 127.0.0.1:6379 ended: closed")
        yield {}

    keyspace.scan_records = scan_records  # type: ignore[method-assign]
    with pytest.raises(RedisFailure):
        await follower._take_over()
    is_reachable = True
    await follower._step()
    replica = follower._replica.lazy
    assert replica is not None
    is_reachable = False
    with pytest.raises(RedisFailure):
        await follower._load_replica()
    assert follower._replica.lazy is replica


class ScriptedReader(LogReader):
    """The reader of a log without further entries."""

    def __init__(self) -> None:
        super().__init__(cast("Any", None), "log")

    async def read(self, wait_ms: int | None) -> list[LogEntry]:  # noqa: ARG002
        return []


async def test_a_follower_applies_large_entries_of_one_read_in_several_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of entries in a read is that of small entries, if the previous ones were small."""

    class ReaderOfLargeEntries(ScriptedReader):
        async def read(self, wait_ms: int | None) -> list[LogEntry]:  # noqa: ARG002
            return [
                BatchCommitted((7, index), (b"0 1 1\n%d " % index).ljust(300 << 10), resigned=False)
                for index in range(20)
            ]

    applied = [0]

    def apply_pending(_: LazyReplica) -> Iterator[None]:
        applied.append(applied.pop() + 1)
        yield

    monkeypatch.setattr(LazyReplica, "_apply_pending", apply_pending)
    follower = follower_of(ScriptedKeyspace(led_by(OWN)))
    follower._reader = ReaderOfLargeEntries()
    follower._replica.lazy = LazyReplica(StateMachine())
    reading = asyncio.create_task(follower._read_log(None))
    while not reading.done():
        await asyncio.sleep(0)
        applied.append(0)
    assert max(applied) == 1
    assert sum(applied) == 20


def test_a_replica_applies_records_of_many_names_before_many_are_pending() -> None:
    """Each record has thousands of names, so that 2,000 of them would take seconds."""
    machine, applied = StateMachine(), list[int]()
    apply_in_parts = machine.apply_in_parts

    def count_names(batch: Batch) -> Iterator[None]:
        applied.append(sum(len(each.names()) for each in batch.changes.values() if isinstance(each, Request)))
        return apply_in_parts(batch)

    machine.apply_in_parts = count_names  # type: ignore[method-assign]
    replica = LazyReplica(machine)
    for id_ in range(1, 41):
        request = Request((), tuple(f"{id_}/{name}" for name in range(5_000)), transaction_timeout_ms=1e9)
        request.id, request.owner, request.state, request.fence = id_, id_, State.HELD, id_
        request.since, request.since_unix_ms, request.deadline = 0.0, 0.0, 1
        batch = Batch({id_: request}, id_ + 1, id_ + 1, 0.0)
        encoded = encode_batch(batch, encode_changes(batch.changes))
        for _ in replica.append(BatchCommitted((1, id_), encoded, resigned=False)):
            pass
    assert len(applied) > 5
    assert max(applied) <= 50_000
    assert len(replica.state_machine().manager.table.held) == 40
    assert sum(applied) == 40 * 5_000


@pytest.mark.parametrize("count", [10, 40])
def test_a_replica_opens_subtrees_in_parts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a few new subtrees is compared with all names, and many of them together are."""
    monkeypatch.setattr(replica_module, "MAX_PENDING_IDS", count - 1)
    leader, machine = LockManager(), StateMachine()
    for first in range(0, 40_000, 1_000):
        names = tuple(f"a/{number}" for number in range(first, first + 1_000))
        leader.step(Request((), names, transaction_timeout_ms=1e9), 0)
    machine.apply(Batch(dict(leader.table.held), leader.next_id, leader.next_fence, 0.0))
    opened: dict[int, Change] = {}
    for number in range(count):
        request = Request((f"{number}/**",), (), transaction_timeout_ms=1e9)
        request.details = details_of(request.shared, ())
        leader.step(request, 0)
        opened[request.id] = request
    batch = Batch(opened, leader.next_id, leader.next_fence, 0.0)
    encoded = encode_batch(batch, encode_changes(batch.changes))
    replica, parts = LazyReplica(machine), list[int]()
    for _ in replica.append(BatchCommitted((1, 1), encoded, resigned=False)):
        parts.append(len(machine.manager.table.subtrees))
    assert len(parts) > 10
    assert count > 16 or max(after - before for before, after in pairwise(parts)) == 1
    assert len(replica.state_machine().manager.table.subtrees) == count
    check(machine.manager)


def parts_of_deletion(leader: LockManager, ids: Iterable[int], *, adopted: Iterable[Request]) -> Iterator[LockTable]:
    """Apply to the replica of a state the deletion of `ids`, and yield its lock table before it and after each part."""
    machine, count = StateMachine(), len([*ids])
    machine.apply(Batch({each.id: deepcopy(each) for each in adopted}, leader.next_id, leader.next_fence, 0.0))
    yield machine.manager.table
    batch = Batch(dict.fromkeys(ids), leader.next_id, leader.next_fence, 0.0)
    encoded = encode_batch(batch, encode_changes(batch.changes))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(replica_module, "MAX_PENDING_IDS", count - 1)
        replica = LazyReplica(machine)
        for _ in replica.append(BatchCommitted((1, 1), encoded, resigned=False)):
            yield machine.manager.table
    assert not machine.manager.table.specials


def test_a_replica_removes_requests_of_many_names_in_parts() -> None:
    """The record of a deletion is short, so 2,000 requests with 1,024 names each may be deleted together."""
    leader = LockManager()
    for number in range(20):
        leader.step(Request((), tuple(f"{number}/{name}" for name in range(1_000)), transaction_timeout_ms=1e9), 0)
    held = leader.table.held
    locks = [table.locks for table in parts_of_deletion(leader, held, adopted=held.values())]
    assert (locks[0], locks[-1]) == (20_000, 0)
    assert max(before - after for before, after in pairwise(locks)) == 2_000


def test_a_replica_closes_a_subtree_with_many_waiting_requests_in_parts() -> None:
    leader = LockManager()
    subtree = Request((), ("**",), transaction_timeout_ms=1e9)
    subtree.details = details_of((), subtree.exclusive)
    leader.step(subtree, 0)
    for number in range(10_000):
        leader.step(Request((), (f"{number}",), queue_timeout_ms=1e9), 0)
    requests = [subtree, *leader.table.waiting.values()]
    entries = [table.queue_entries for table in parts_of_deletion(leader, [subtree.id], adopted=requests)]
    assert (entries[0], entries[-1]) == (20_000, 10_000)
    assert max(before - after for before, after in pairwise(entries)) < 2_000


async def test_a_new_leader_applies_the_last_records_in_parts() -> None:
    """They may delete 2,000 requests with 1,024 names each. If it is interrupted, the others are applied later."""
    leader, machine = LockManager(), StateMachine()
    for number in range(10):
        leader.step(Request((), tuple(f"{number}/{name}" for name in range(1_000)), transaction_timeout_ms=1e9), 0)
    machine.apply(Batch(deepcopy(leader.table.held), leader.next_id, leader.next_fence, 0.0))
    batch = Batch(dict.fromkeys(leader.table.held), leader.next_id, leader.next_fence, 0.0)
    encoded = encode_batch(batch, encode_changes(batch.changes))
    follower = follower_of(ScriptedKeyspace(led_by(OWN)))
    follower._replica.lazy = LazyReplica(machine)
    [*follower._replica.append(BatchCommitted((1, 1), encoded, resigned=False))]
    applying = asyncio.create_task(follower._replica.apply())
    locks = [machine.manager.table.locks]
    while not applying.done():
        await asyncio.sleep(0)
        locks.append(machine.manager.table.locks)
        if locks[-1] == 6_000:
            applying.cancel()
    assert max(before - after for before, after in pairwise(locks)) == 2_000
    assert (locks[0], locks[-1]) == (10_000, 6_000)
    await follower._replica.apply()
    assert machine.manager.table.locks == 0


def test_a_replica_whose_records_are_being_applied_is_complete_when_it_is_needed() -> None:
    replica = LazyReplica(StateMachine())
    requests: dict[int, Change] = {}
    leader = LockManager()
    for number in range(3_000):
        request = Request((), (f"{number}",), transaction_timeout_ms=1e9)
        leader.step(request, 0)
        requests[request.id] = request
    batch = Batch(requests, leader.next_id, leader.next_fence, 0.0)
    encoded = encode_batch(batch, encode_changes(batch.changes))
    next(replica.append(BatchCommitted((1, 1), encoded, resigned=False)))
    ended = Batch(dict.fromkeys([*requests][:10]), leader.next_id, leader.next_fence, 0.0)
    encoded = encode_batch(ended, encode_changes(ended.changes))
    replica.append(BatchCommitted((1, 2), encoded, resigned=False))
    assert len(replica.state_machine().manager.table.held) == 2_990
