"""Leader election without a coordinator, and the balancing of leadership over the nodes.

`decide` is a pure function: it returns what a candidate does next, given what it has read and replicated. It neither
waits nor calls Redis; `follower.py` executes its decisions. Candidates are ranked: first the last leader, whose lease
may still be valid; then the candidate that has replicated the most acknowledged commits; among equals, the node that
leads the fewest namespaces. A candidate of a lower rank waits longer before it acquires leadership.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from math import inf
from typing import NamedTuple

from genie.storage.redis.connection import UNKNOWN_RUN, RedisRun
from genie.storage.redis.keyspace import LeaderEpoch, Meta
from genie.storage.redis.log import Position
from genie.storage.redis.replica import LocalReplica
from genie.storage.store import Node

RECOVERY_GRACE_S = 1.0
"""If Redis may have lost commits, each lower rank waits longer by this time. It exceeds the pause between two attempts
to connect, so that a node of the next higher rank can reconnect in time."""


class Action(Enum):
    """What a candidate does next."""

    READ_AGAIN = auto()
    """Read `meta` again: the leader has changed since its lease expired."""
    LOAD_SNAPSHOT = auto()
    """Load all records: this node has no replica, or the log does not continue the replica."""
    DISCARD_REPLICA = auto()
    """Split brain: two leaders diverged. The surviving Redis wins, so the local replica is discarded."""
    TAIL_LOG = auto()
    """Follow the leader until its lease expires."""
    ACQUIRE = auto()
    """Acquire leadership, and continue from the stored state. Commits that Redis lacks are restored afterwards."""
    RESTORE = auto()
    """Redis is empty: restore the snapshot from this node's memory, and lead."""


class Decision(NamedTuple):
    """The next action. The other fields say what to wait for before leadership is acquired."""

    action: Action
    not_before: float | None = None
    """Wait until this event-loop time, so that a candidate of a higher rank can take over. While waiting, and once more
    at the end, the candidate compares its position with the published ones. None if no candidate can have a higher
    rank."""
    rolled_back: bool = False
    """True if Redis may lack commits that this node has replicated. The wait begins with the first such observation."""
    delayed: bool = False
    """True to wait for the election delay as well, so that nodes that lead fewer namespaces win."""


@dataclass
class Candidacy:
    """The observations of a candidate about a namespace. Times are event-loop times in seconds."""

    last_sign_of_life: float
    """When a leader was last observed to be alive. Before the first observation, when this node last connected to
    Redis."""
    has_seen_leader: bool
    """False if this Redis may lack acknowledged commits, because no leader was seen alive since it became the primary or
    restarted."""
    empty_since: float | None = None
    """When the namespace was first observed to be empty. None if it is not empty."""
    empty_log_end: str = ""
    """The id of the last log entry since `empty_since`: Redis may have lost the metadata, but not the log."""
    rollback: tuple[LeaderEpoch, Position] | None = None
    """The last epoch and position at which Redis lacked commits that this node has replicated."""
    redis_run: RedisRun = UNKNOWN_RUN
    """The run of the Redis whose `meta` was read."""
    restarted_at: float | None = None
    """When that Redis has restarted since the last takeover or resignation that it has, or when this node last failed to reach it, if
    that was later: a Redis that loads many records rejects all commands. None if it has not restarted, or if the primary may change."""
    unreachable_at: float = -inf
    """When this node last failed to reach Redis. `-inf` if it has not failed."""
    expired_epoch: LeaderEpoch | None = None
    """The epoch whose lease has expired at the last read of the log. None if its leader may be alive."""

    def reset(self, now: float, *, primary_may_change: bool) -> None:
        """Start observing again after Redis was unreachable.

        Redis may have been unreachable for the leader, too, so the wait for the end of the lease begins again.
        """
        self.last_sign_of_life = self.unreachable_at = now
        self.empty_since = self.expired_epoch = self.restarted_at = None
        self.has_seen_leader = not primary_may_change
        self.redis_run = UNKNOWN_RUN

    def note_run(self, run: RedisRun, meta: Meta | None, *, primary_may_change: bool) -> None:
        """Record which run of Redis `meta` was read from. A Redis that restarts may lose its last writes."""
        if run.id == self.redis_run.id:
            return
        self.redis_run = run
        if meta is not None and run.id != meta.run_id:  # Redis has restarted since the leader took over
            self.has_seen_leader = False
            self.restarted_at = None if primary_may_change else max(run.started_at, self.unreachable_at)

    def note_stall(self, now: float) -> None:
        """Record that Redis did not answer for a while. The wait for the end of the lease begins again.

        In that time no other candidate could connect and publish a later position.
        """
        self.last_sign_of_life = now
        self.empty_since = None

    def note_rollback(self, meta: Meta, now: float) -> None:
        """Record that Redis lacks commits. The leader that made them can restore them within its lease.

        So for each new position of Redis, the wait for the end of the lease begins again.
        """
        if self.rollback != (meta.epoch, meta.position):
            self.rollback = meta.epoch, meta.position
            self.last_sign_of_life = now

    def sign_of_life_at(self, meta: Meta, now: float) -> float:
        """Return the value that `last_sign_of_life` would have after `note_rollback(meta, now)`."""
        return self.last_sign_of_life if self.rollback == (meta.epoch, meta.position) else now


def _lost_leader_gone_at(meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node) -> float:
    """Return the event-loop time after which no leader is alive whose takeover Redis has lost when it restarted.

    By then the leader has restored its commits, or its lease has expired and candidates of a higher rank had time to take
    over. The result is `inf` if the time is unknown, because the primary may change.
    """
    if candidacy.restarted_at is None:
        return inf
    lease_s = (meta.node or node).lease_ms / 1000  # that of this node if no leader is stored
    return candidacy.restarted_at + lease_s + rank_delay_s(meta, candidacy, replica)


def is_vacant(meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> bool:
    """Return whether the leader stored in `meta` cannot be alive: it has resigned, or was this node before a restart.

    After a restart of this node, the namespace is vacant only if Redis cannot have lost the takeover by a later leader.
    """
    if meta.node is None:
        return True
    may_lack_later_leader = not candidacy.has_seen_leader and now < _lost_leader_gone_at(meta, candidacy, replica, node)
    return node.is_restart_of(meta.node) and not may_lack_later_leader


def rank_delay_s(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica) -> float:
    """Return how long this candidate waits in addition to a lease, by its rank.

    1. A node that was the last leader, according to its log: 0.
    2. A node that has replicated commits that Redis lacks: `RECOVERY_GRACE_S`.
    3. Any other node: 0 if a leader was seen alive at this Redis. Otherwise twice `RECOVERY_GRACE_S`, because this Redis may
       lack commits.
    """
    if replica.has_led_last:
        return 0.0
    if replica.history is not None and (meta is None or replica.has_commits_missing_from(meta.history)):
        return RECOVERY_GRACE_S
    return 0.0 if candidacy.has_seen_leader else 2 * RECOVERY_GRACE_S


def decide(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> Decision:
    """Return what a candidate does next. `meta` was just read, and is None for an empty namespace.

    `now` is event-loop time.
    """
    if candidacy.expired_epoch is not None:
        return _on_expired_lease(meta, candidacy, replica, now)
    if meta is None:
        return _on_empty(candidacy, replica, node, now)
    if replica.has_led_last and replica.missing_from(meta.history) is not None:
        # At once, without loading the state that Redis has: until this node has published its position, another node, with
        # fewer of the commits that Redis lacks, might take over.
        not_before = _prior_leader_gone_at(meta, candidacy, replica, node, now)
        return Decision(Action.ACQUIRE, not_before, rolled_back=True)
    read_position = replica.read_history.position
    has_read = read_position > (0, 0)
    diverged = has_read and not meta.history.contains(read_position)
    if is_vacant(meta, candidacy, replica, node, now):
        return _on_vacant(meta, candidacy, replica, node, now, diverged=diverged)
    return _on_leader(meta, candidacy, replica, node, now, diverged=diverged)


def _on_leader(
    meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float, *, diverged: bool
) -> Decision:
    """Decide what to do if the leader stored in `meta` may be alive.

    With `diverged`, the epoch history of `meta` does not contain the position of the replica, because of a rollback
    or a fork.
    """
    if not replica.is_loaded:
        return Decision(Action.LOAD_SNAPSHOT)
    lacks_commits = replica.has_commits_missing_from(meta.history)
    if diverged and not lacks_commits:
        return Decision(Action.DISCARD_REPLICA)
    if lacks_commits and (diverged or not candidacy.has_seen_leader):
        # Redis was rolled back. If the leader does not restore the snapshot within a lease, this node does.
        not_before = _prior_leader_gone_at(meta, candidacy, replica, node, now)
        return Decision(Action.ACQUIRE, not_before, rolled_back=True)
    return Decision(Action.TAIL_LOG)


def _on_empty(candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> Decision:
    """Decide what to do if the namespace is empty: it is new, or Redis has lost everything.

    The candidate first waits for the duration of a lease, in which a leader that is alive can restore the state.
    """
    since = now if candidacy.empty_since is None else candidacy.empty_since
    not_before = since + node.lease_ms / 1000 + rank_delay_s(None, candidacy, replica)
    can_restore = replica.history is not None and replica.history.position > (0, 0)  # (0, 0): an empty state
    return Decision(Action.RESTORE if can_restore else Action.ACQUIRE, not_before, delayed=True)


def _on_vacant(
    meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float, *, diverged: bool
) -> Decision:
    """Decide what to do if the stored leader has resigned, or was this node before a restart (`is_vacant`)."""
    if not replica.is_loaded and not (diverged and candidacy.has_seen_leader):
        # A node must not lead with records that it cannot decode, so it loads them first. But the position of a
        # diverged replica is kept: it tells how long to wait for the leader that made the missing commits.
        return Decision(Action.LOAD_SNAPSHOT)
    delayed = meta.node is None  # a restarted leader takes over at once
    if diverged or not candidacy.has_seen_leader:
        # The leader that made the missing commits may be alive, and still be connected to the former primary.
        not_before = _prior_leader_gone_at(meta, candidacy, replica, node, now)
        if not diverged:
            not_before = min(not_before, _lost_leader_gone_at(meta, candidacy, replica, node))
        return Decision(Action.ACQUIRE, not_before, rolled_back=True, delayed=delayed)
    return Decision(Action.ACQUIRE, delayed=delayed)


def _on_expired_lease(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica, now: float) -> Decision:
    """Decide what to do after the leader has committed nothing for the duration of its lease."""
    if meta is None or meta.epoch != candidacy.expired_epoch:
        return Decision(Action.READ_AGAIN)
    if not replica.read_history.contains(meta.position):  # the log is lost, or truncated
        return Decision(Action.LOAD_SNAPSHOT)
    # A Redis at which a leader was seen alive lacks no acknowledged commits, so no candidate can have a higher rank.
    not_before = None if candidacy.has_seen_leader else now
    return Decision(Action.ACQUIRE, not_before, delayed=True)


def _prior_leader_gone_at(meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> float:
    """Return the event-loop time after which this candidate may replace a leader whose commits Redis lacks.

    By then the lease of that leader has expired, and candidates of a higher rank had time to take over.
    """
    lease_s = (meta.node or node).lease_ms / 1000  # that of this node if no leader is stored
    return candidacy.sign_of_life_at(meta, now) + lease_s + rank_delay_s(meta, candidacy, replica)


# -- Leadership balancing -----------------------------------------------------------------------------

DELAY_PER_NAMESPACE_S = 0.1
"""The election delay has two parts: this time for each namespace that this node leads, and this time for each namespace
that it leads in excess of the node that leads the fewest."""
MAX_DELAY_S = 0.5
"""The maximum of each of the two parts, because a node may lead many namespaces."""
TRANSFERRED_DELAY_S = 1.0
"""Additional election delay for a namespace that this node has just transferred, so that it does not win it again."""
MIN_IMBALANCE = 2
"""A node transfers a namespace if it leads at least this many more than the receiver. With a difference of one, the
transfer would only exchange their roles."""


class LeadershipBalancer:
    """Records which node, identified by its address, leads each namespace that this node serves, and decides about transfers.

    Leadership is balanced without a coordinator, by two rules:

    - Election delay: the more namespaces a node leads, the longer it waits before it competes for a vacant one.
    - Transfer: a node that leads at least two namespaces fewer than another node requests one of that node's namespaces. The
      leader polls for such requests, and resigns.

    Transfers stop when the nodes that serve the same namespaces lead equally many, with a difference of at most one.
    """

    def __init__(self) -> None:
        self._leaders: dict[str, str] = {}
        """The address of the leader by namespace, for namespaces with a known leader."""
        self._transferred: dict[str, str] = {}
        """The address of the receiver by namespace that this node has transferred, until the new leader is known."""

    def set_leader(self, namespace: str, address: str | None) -> None:
        """Record the address of the node that leads a namespace, or None if the leader is unknown."""
        if address is None:
            self._leaders.pop(namespace, None)
        else:
            self._leaders[namespace] = address
            self._transferred.pop(namespace, None)  # the transfer, if there was one, is complete

    def count(self, address: str) -> int:
        """Return how many namespaces the node at `address` leads."""
        return sum(leader == address for leader in self._leaders.values())

    def election_delay_s(self, own_address: str, namespace: str) -> float:
        """Return how long this node, at address `own_address`, waits before it competes for a vacant namespace.

        One part of the delay grows with the number of namespaces that this node leads, the other with the difference to
        the node that leads the fewest. For a namespace that this node has just transferred, the delay is longer.
        """
        own_count = self.count(own_address)
        min_count = min(Counter(self._leaders.values()).values(), default=0)
        delay_s = min(DELAY_PER_NAMESPACE_S * own_count, MAX_DELAY_S)
        if own_count:  # a node that leads none is not among the counted nodes, so the difference would be negative
            delay_s += min(DELAY_PER_NAMESPACE_S * (own_count - min_count), MAX_DELAY_S)
        if namespace in self._transferred:
            delay_s += TRANSFERRED_DELAY_S
        return delay_s

    def start_transfer(self, namespace: str, own_address: str, receiver: str, receiver_count: int) -> bool:
        """Decide whether this node, at `own_address`, transfers a namespace to the node at address `receiver`, and record it.

        Returns False, without a record, if this node does not lead `MIN_IMBALANCE` namespaces more than the receiver.
        `receiver_count` is how many namespaces the receiver led when it sent the request. Namespaces whose transfer to the
        receiver has already begun count as its own, so that repeated requests do not transfer too many.
        """
        transferred_count = sum(address == receiver for address in self._transferred.values())
        known_count = max(receiver_count, self.count(receiver) + transferred_count)
        if receiver == own_address or self.count(own_address) - known_count < MIN_IMBALANCE:
            return False
        self.set_leader(namespace, None)
        self._transferred[namespace] = receiver
        return True

    def namespace_to_request(self, own_address: str) -> str | None:
        """Return the namespace that this node, at `own_address`, should request from the node that leads the most.

        Return None if that node leads less than `MIN_IMBALANCE` namespaces more than this node.
        """
        counts = Counter(self._leaders.values())
        busiest, max_count = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if max_count - counts[own_address] < MIN_IMBALANCE:
            return None
        candidates = [namespace for namespace, leader in self._leaders.items() if leader == busiest]
        # The order depends on a hash with the own address, so that different nodes request different namespaces.
        return min(candidates, key=lambda namespace: blake2b(f"{own_address} {namespace}".encode()).digest())
