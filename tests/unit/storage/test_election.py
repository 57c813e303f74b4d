"""Decisions of a candidate: a table from what it has read, replicated and observed to its next action."""

from __future__ import annotations

from typing import Any, cast

import pytest

from genie.storage.redis.connection import RedisRun
from genie.storage.redis.election import Action, Candidacy, Decision, decide, rank_delay_s
from genie.storage.redis.keyspace import Checkpoint, LeaderEpoch, Meta
from genie.storage.redis.log import EpochHistory, LogReader, Position
from genie.storage.redis.replica import LazyReplica, LocalReplica, PriorLeadership, Snapshot
from genie.storage.store import Batch, Node, StateMachine

NODE = Node(listening="here", address="own", lease_ms=3_000, boot="today", host="machine")
RESTARTED = NODE
"""The stored node of this server from before its restart."""
OTHER = Node(address="other", lease_ms=5_000)
EPOCH = LeaderEpoch(7, "nonce", "state")
NOW = 100.0
EMPTY: tuple[Position, ...] = ((0, 0),)


def meta_of(node: Node | None, *, index: int = 3) -> Meta:
    return Meta(EPOCH, node, (7, index), Checkpoint((7, 0), Batch()), ((0, 0),), run_id="a")


def replica_of(*read: Position, loaded: bool = True, led: Position | None = None) -> LocalReplica:
    """Return a replica with the lineage `read`, of a node that, with `led`, was the leader up to that position."""
    reader = LogReader(cast("Any", None), "log")
    reader.seek(EpochHistory(((0, 0), *read)))
    prior = None if led is None else PriorLeadership(Snapshot(EpochHistory(((0, 0), led)), Batch()), led)
    replica = LocalReplica(reader, prior)
    replica.lazy = LazyReplica(StateMachine()) if loaded else None
    return replica


def candidacy_of(*, confirmed: bool = True, **observed: Any) -> Candidacy:
    """Return a candidate that observed the last sign of life ten seconds ago; `confirmed`: of a leader at this Redis."""
    return Candidacy(NOW - 10, confirmed, **observed)


UP_TO_DATE = replica_of((7, 3))
AHEAD = replica_of((7, 5))
FORKED = replica_of((7, 2), (6, 9))
NOT_LOADED = replica_of(loaded=False)
GRACE_S = 1.0


@pytest.mark.parametrize(
    ("meta", "candidacy", "replica", "decision"),
    [
        # -- an empty namespace: a living leader would restore it within its lease
        (None, candidacy_of(), NOT_LOADED, Decision(Action.ACQUIRE, NOW + 3, delayed=True)),
        (None, candidacy_of(empty_since=NOW - 2), NOT_LOADED, Decision(Action.ACQUIRE, NOW + 1, delayed=True)),
        (None, candidacy_of(confirmed=False), NOT_LOADED, Decision(Action.ACQUIRE, NOW + 3 + 2 * GRACE_S, delayed=True)),
        (None, candidacy_of(), UP_TO_DATE, Decision(Action.RESTORE, NOW + 3 + GRACE_S, delayed=True)),
        (None, candidacy_of(), replica_of(loaded=False, led=(7, 3)), Decision(Action.RESTORE, NOW + 3, delayed=True)),
        # -- a leader is stored
        (meta_of(OTHER), candidacy_of(), NOT_LOADED, Decision(Action.LOAD_SNAPSHOT)),
        (meta_of(OTHER), candidacy_of(), UP_TO_DATE, Decision(Action.TAIL_LOG)),
        (meta_of(OTHER), candidacy_of(confirmed=False), UP_TO_DATE, Decision(Action.TAIL_LOG)),
        (meta_of(RESTARTED), candidacy_of(confirmed=False), UP_TO_DATE, Decision(Action.TAIL_LOG)),
        (meta_of(OTHER), candidacy_of(), FORKED, Decision(Action.DISCARD_REPLICA)),
        # -- Redis rolled back: the leader restores the snapshot or, a lease after the rollback was observed, this node
        (meta_of(OTHER), candidacy_of(), AHEAD, Decision(Action.ACQUIRE, NOW + 5 + GRACE_S, rolled_back=True)),
        (
            meta_of(OTHER),
            candidacy_of(rollback=(EPOCH, (7, 3))),
            AHEAD,
            Decision(Action.ACQUIRE, NOW - 10 + 5 + GRACE_S, rolled_back=True),
        ),
        (
            meta_of(OTHER),
            candidacy_of(rollback=(EPOCH, (7, 2))),
            AHEAD,
            Decision(Action.ACQUIRE, NOW + 5 + GRACE_S, rolled_back=True),
        ),
        # -- Redis lacks commits that this node has acknowledged as the leader: it competes before it has loaded the state
        (
            meta_of(OTHER),
            candidacy_of(),
            replica_of(loaded=False, led=(7, 5)),
            Decision(Action.ACQUIRE, NOW + 5, rolled_back=True),
        ),
        (meta_of(OTHER), candidacy_of(), replica_of((7, 3), led=(7, 5)), Decision(Action.ACQUIRE, NOW + 5, rolled_back=True)),
        (meta_of(None), candidacy_of(), replica_of(loaded=False, led=(7, 5)), Decision(Action.ACQUIRE, NOW + 3, rolled_back=True)),
        (meta_of(OTHER), candidacy_of(), replica_of(loaded=False, led=(7, 3)), Decision(Action.LOAD_SNAPSHOT)),
        # -- the leader has resigned
        (meta_of(None), candidacy_of(), UP_TO_DATE, Decision(Action.ACQUIRE, delayed=True)),
        (meta_of(None), candidacy_of(), AHEAD, Decision(Action.ACQUIRE, NOW + 3 + GRACE_S, rolled_back=True, delayed=True)),
        (meta_of(None), candidacy_of(confirmed=False), NOT_LOADED, Decision(Action.LOAD_SNAPSHOT)),
        (
            meta_of(None),
            candidacy_of(confirmed=False),
            UP_TO_DATE,
            Decision(Action.ACQUIRE, NOW + 3 + 2 * GRACE_S, rolled_back=True, delayed=True),
        ),
        # -- the stored leader is this node before its restart
        (meta_of(RESTARTED), candidacy_of(), UP_TO_DATE, Decision(Action.ACQUIRE)),
        # -- Redis has restarted, and may have lost the takeover of a leader that is alive, or of one that has more commits
        (meta_of(RESTARTED), candidacy_of(confirmed=False, restarted_at=NOW - 4.9), UP_TO_DATE, Decision(Action.TAIL_LOG)),
        (
            meta_of(RESTARTED),
            candidacy_of(confirmed=False, restarted_at=NOW - 5),
            UP_TO_DATE,
            Decision(Action.ACQUIRE, NOW, rolled_back=True),
        ),
        (
            meta_of(None),
            candidacy_of(confirmed=False, restarted_at=NOW - 4),
            UP_TO_DATE,
            Decision(Action.ACQUIRE, NOW + 1, rolled_back=True, delayed=True),
        ),
        # -- a node must not lead with records that it cannot decode, so it loads them first
        (meta_of(None), candidacy_of(), NOT_LOADED, Decision(Action.LOAD_SNAPSHOT)),
        (meta_of(RESTARTED), candidacy_of(), NOT_LOADED, Decision(Action.LOAD_SNAPSHOT)),
        (
            meta_of(None),
            candidacy_of(),
            replica_of((7, 5), loaded=False),
            Decision(Action.ACQUIRE, NOW + 3, rolled_back=True, delayed=True),
        ),
        (meta_of(RESTARTED), candidacy_of(), AHEAD, Decision(Action.ACQUIRE, NOW + 3 + GRACE_S, rolled_back=True)),
        # -- the lease of the leader has expired
        (meta_of(OTHER), candidacy_of(expired_epoch=EPOCH), UP_TO_DATE, Decision(Action.ACQUIRE, delayed=True)),
        (
            meta_of(OTHER),
            candidacy_of(expired_epoch=EPOCH, confirmed=False),
            UP_TO_DATE,
            Decision(Action.ACQUIRE, NOW, delayed=True),
        ),
        (meta_of(OTHER, index=4), candidacy_of(expired_epoch=EPOCH), UP_TO_DATE, Decision(Action.LOAD_SNAPSHOT)),
        (
            meta_of(OTHER),
            candidacy_of(expired_epoch=LeaderEpoch(6, "before", "state")),
            UP_TO_DATE,
            Decision(Action.READ_AGAIN),
        ),
        (None, candidacy_of(expired_epoch=EPOCH), UP_TO_DATE, Decision(Action.READ_AGAIN)),
    ],
)  # fmt: skip
def test_a_candidate_decides_by_what_it_has_observed(
    meta: Meta | None, candidacy: Candidacy, replica: LocalReplica, decision: Decision
) -> None:
    before = repr(candidacy)
    assert decide(meta, candidacy, replica, NODE, NOW) == decision
    assert repr(candidacy) == before, "decide() has no side effects"


@pytest.mark.parametrize(
    ("led", "read", "delay_s"),
    [
        ((7, 4), None, 0.0),  # it has led later than the stored state
        ((7, 4), (8, 2), 1.0),  # and has replicated what a later leader committed
        (None, (7, 4), 1.0),
        (None, (7, 3), 2.0),
        ((7, 3), None, 0.0),
        (None, None, 2.0),
    ],
)
def test_the_last_leader_ranks_first_and_then_the_most_complete_replica(
    led: Position | None, read: Position | None, delay_s: float
) -> None:
    meta = meta_of(RESTARTED)
    if read is None:
        replica = replica_of((7, 3), loaded=False, led=led)
    else:
        replica = replica_of(*([(7, 3), read] if read[0] > 7 else [read]), led=led)
    assert rank_delay_s(meta, candidacy_of(confirmed=False), replica) == delay_s
    assert rank_delay_s(meta, candidacy_of(), replica) == (delay_s if delay_s < 2 else 0)


def test_a_rollback_restarts_the_lease_once() -> None:
    candidacy = candidacy_of()
    for now, index, last in [(NOW, 3, NOW), (NOW + 1, 3, NOW), (NOW + 2, 2, NOW + 2)]:
        meta = meta_of(OTHER, index=index)
        assert candidacy.sign_of_life_at(meta, now) == last
        candidacy.note_rollback(meta, now)
        assert candidacy.last_sign_of_life == last


def test_after_a_restart_of_redis_no_leader_was_seen_until_one_takes_over() -> None:
    candidacy, first, second = candidacy_of(), RedisRun("a", NOW - 9), RedisRun("b", NOW - 1)
    candidacy.note_run(first, meta_of(OTHER), primary_may_change=False)
    assert (candidacy.has_seen_leader, candidacy.restarted_at) == (True, None)
    for _ in range(2):
        candidacy.reset(NOW - 2, primary_may_change=False)
        candidacy.note_run(second, meta_of(OTHER), primary_may_change=False)
        assert (candidacy.has_seen_leader, candidacy.restarted_at) == (False, NOW - 1)
    candidacy.has_seen_leader = True
    candidacy.note_run(second, meta_of(OTHER), primary_may_change=False)
    assert candidacy.has_seen_leader, "the leader was seen at this run"
    candidacy.note_run(first, meta_of(OTHER), primary_may_change=True)
    assert candidacy.has_seen_leader, "the last takeover was at this run"
    candidacy.note_run(second, meta_of(OTHER), primary_may_change=True)
    assert (candidacy.has_seen_leader, candidacy.restarted_at) == (False, None), "another primary may have more commits"


@pytest.mark.parametrize("stored", [None, RESTARTED])
def test_a_redis_that_loads_for_long_is_as_new_when_it_answers(stored: Node | None) -> None:
    """A leader whose takeover Redis has lost cannot reconnect earlier, and then restores its commits."""
    candidacy, meta = candidacy_of(), meta_of(stored)
    candidacy.reset(NOW, primary_may_change=False)  # it is still loading
    candidacy.note_run(RedisRun("b", NOW - 60), meta, primary_may_change=False)
    gone_at = NOW + 3 + 2 * GRACE_S
    before = decide(meta, candidacy, UP_TO_DATE, NODE, gone_at - 0.1)
    assert before.action is Action.TAIL_LOG or before.not_before == gone_at
    decision = decide(meta, candidacy, UP_TO_DATE, NODE, gone_at)
    assert decision == Decision(Action.ACQUIRE, gone_at, rolled_back=True, delayed=stored is None)


@pytest.mark.parametrize("may_change", [True, False])
def test_after_an_outage_no_leader_is_confirmed_at_a_primary_that_may_have_changed(may_change: bool) -> None:
    candidacy = candidacy_of(empty_since=NOW - 5, expired_epoch=EPOCH)
    candidacy.reset(NOW, primary_may_change=may_change)
    assert candidacy.has_seen_leader == (not may_change)
    assert candidacy.last_sign_of_life == NOW
    assert candidacy.empty_since is candidacy.expired_epoch is None


@pytest.mark.parametrize(
    ("loaded", "is_kept"),
    [
        (((5, 4),), True),  # an earlier state of its own
        (((5, 4), (6, 0)), True),  # continued by an epoch without commits
        (((5, 4), (6, 1)), False),  # continued by another leader, which has committed
        (((5, 4), (7, 3)), False),  # the same state
        (((5, 4), (7, 3), (8, 1)), False),
        (((5, 5),), True),  # with a batch that this node has sent, but not acknowledged
        (((5, 6),), False),
    ],
)
def test_a_former_leader_keeps_its_state_if_redis_has_no_commits_beyond_it(
    loaded: tuple[Position, ...], is_kept: bool
) -> None:
    led = EpochHistory(((0, 0), (5, 4), (7, 3)))
    reader = LogReader(cast("Any", None), "log")
    replica = LocalReplica(reader, PriorLeadership(Snapshot(led, Batch()), led.position), [(5, 5)])
    reader.seek(EpochHistory(((0, 0), *loaded)))
    replica.replace(StateMachine())
    if is_kept:
        assert not replica.has_commits_missing_from(led), "Redis has exactly this state"
    assert replica.has_commits_missing_from(reader.history) == is_kept
    assert (replica.missing_from(reader.history) is not None) == is_kept


def test_a_replica_that_is_equal_to_redis_lacks_nothing_although_a_batch_of_it_was_not_acknowledged() -> None:
    history = EpochHistory(((0, 0), (5, 10), (6, 0)))
    reader = LogReader(cast("Any", None), "log")
    replica = LocalReplica(reader, unacknowledged=[(5, 10)])
    reader.seek(history)
    replica.replace(StateMachine())
    assert not replica.has_commits_missing_from(history)
    assert replica.missing_from(history) is None
