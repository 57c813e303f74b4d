"""Leader election without a coordinator, and the balancing of leadership over the nodes.

`decide` is a pure function: it returns what a candidate does next, given what it has read and replicated. It neither waits
nor calls Redis; `follower.py` executes its decisions. Candidates are ranked: first the last leader, whose lease may still be
valid; then the candidate that has replicated the most acknowledged commits; among equals, the node that leads the fewest
namespaces. The rank is expressed in time: a lower rank waits longer.
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
"""If Redis may have lost commits, each lower rank waits longer by this time. It exceeds the pause between two attempts to
connect, so that a node of the next higher rank can reconnect in time."""


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
    """Wait until this event-loop time, so that a candidate of a higher rank can take over. While waiting, and once more at
    the end, the candidate compares its position with the published ones. None if no candidate can have a higher rank."""
    rolled_back: bool = False
    """True if Redis may lack commits that this node has replicated. The wait counts from the first such observation."""
    delayed: bool = False
    """True: wait for the election delay as well, so that nodes that lead fewer namespaces win."""


@dataclass
class Candidacy:
    """The observations of a candidate about a namespace. Times are event-loop times in seconds."""

    last_sign_of_life: float
    """When a leader was last observed to be alive; initially, when this node last connected to Redis."""
    has_seen_leader: bool
    """True if a leader was seen alive at this Redis. If not, this Redis may be a new primary that lacks acknowledged commits.
    Always True if the primary cannot change."""
    empty_since: float | None = None
    """When the namespace was first observed to be empty. None if it is not empty."""
    empty_log_end: str = ""
    """The id of the last log entry since `empty_since`: Redis may have lost the metadata, but not the log."""
    rollback: tuple[LeaderEpoch, Position] | None = None
    """The last epoch and position at which Redis lacked commits that this node has replicated."""
    redis_run: RedisRun = UNKNOWN_RUN
    """The run of the Redis whose `meta` was read."""
    expired_epoch: LeaderEpoch | None = None
    """The epoch whose lease has expired at the last read of the log. None if its leader may be alive."""

    def reset(self, now: float, *, primary_may_change: bool) -> None:
        """Start observing again after Redis was unreachable.

        Redis may have been unreachable for the leader, too, so the wait for the end of the lease begins again.
        """
        self.last_sign_of_life = now
        self.empty_since = self.expired_epoch = None
        self.has_seen_leader = not primary_may_change

    def note_stall(self, now: float) -> None:
        """Record that Redis did not answer for a while. The wait for the end of the lease begins again.

        In that time no other candidate could connect and publish a later position.
        """
        self.last_sign_of_life = now
        self.empty_since = None

    def note_rollback(self, meta: Meta, now: float) -> None:
        """Record that Redis lacks commits. For each new position of Redis, the wait for the end of the lease begins again.

        Within a lease, the leader that made the commits can restore them.
        """
        if self.rollback != (meta.epoch, meta.position):
            self.rollback = meta.epoch, meta.position
            self.last_sign_of_life = now

    def sign_of_life_at(self, meta: Meta, now: float) -> float:
        """Return the value that `last_sign_of_life` would have after `note_rollback(meta, now)`."""
        return self.last_sign_of_life if self.rollback == (meta.epoch, meta.position) else now


def _lost_leader_gone_at(meta: Meta, candidacy: Candidacy, node: Node) -> float:
    """Return the event-loop time until which a leader may be alive whose takeover Redis has lost.

    Redis loses its last writes only when it restarts. Within a lease the leader restores them, or its lease expires. The time
    is `-inf` if Redis has not restarted since the last takeover or resignation that it has.
    """
    run = candidacy.redis_run
    return -inf if run.id == meta.run_id else run.started_at + (meta.node or node).lease_ms / 1000


def is_vacant(meta: Meta, candidacy: Candidacy, node: Node, now: float) -> bool:
    """Return whether the leader stored in `meta` cannot be alive: it has resigned, or was this node before a restart.

    A restart of this node counts only if this Redis does not lack the takeover by a later leader: a leader was seen alive at
    this Redis, and Redis has not restarted within a lease.
    """
    return meta.node is None or (
        candidacy.has_seen_leader
        and node.is_restart_of(meta.node)
        and now >= _lost_leader_gone_at(meta, candidacy, node)
    )


def rank_delay_s(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica) -> float:
    """Return how long this candidate waits in addition to a lease, by its rank.

    1. A node that was the last leader, according to its log: 0.
    2. A node that has replicated commits that Redis lacks: `RECOVERY_GRACE_S`.
    3. Any other node: 0 if a leader was seen alive at this Redis. Otherwise twice `RECOVERY_GRACE_S`, because this Redis may
       be a new primary that lacks commits.
    """
    if replica.has_led_last:
        return 0.0
    if replica.history is not None and (meta is None or replica.has_commits_missing_from(meta.history)):
        return RECOVERY_GRACE_S
    return 0.0 if candidacy.has_seen_leader else 2 * RECOVERY_GRACE_S


def decide(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> Decision:
    """Return what a candidate does next. `meta` was just read, and is None for an empty namespace. `now` is event-loop time."""
    if candidacy.expired_epoch is not None:
        return _on_expired_lease(meta, candidacy, replica, now)
    if meta is None:
        return _on_empty(candidacy, replica, node, now)
    diverged = replica.read_history.position > (0, 0) and not meta.history.contains(replica.read_history.position)
    handle = _on_vacant if is_vacant(meta, candidacy, node, now) else _on_leader
    return handle(meta, candidacy, replica, node, now, diverged=diverged)


def _on_leader(
    meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float, *, diverged: bool
) -> Decision:
    """Decide what to do if the leader stored in `meta` may be alive.

    With `diverged`, the position of the replica is not on the stored lineage, because of a rollback or a fork.
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

    The candidate first waits for a lease, in which a leader that is alive can restore the state.
    """
    since = now if candidacy.empty_since is None else candidacy.empty_since
    not_before = since + node.lease_ms / 1000 + rank_delay_s(None, candidacy, replica)
    history = replica.history
    action = Action.RESTORE if history is not None and history.position > (0, 0) else Action.ACQUIRE
    return Decision(action, not_before, delayed=True)


def _on_vacant(
    meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float, *, diverged: bool
) -> Decision:
    """Decide what to do if the stored leader has resigned, or was this node before a restart (`is_vacant`)."""
    if not replica.is_loaded and not (diverged and candidacy.has_seen_leader):
        # A node must not lead with records that it cannot decode, so it loads them first. But the position of a diverged
        # replica is kept: it tells how long to wait for the leader that made the missing commits.
        return Decision(Action.LOAD_SNAPSHOT)
    delayed = meta.node is None  # a restarted leader takes over at once
    if diverged or not candidacy.has_seen_leader:
        # The leader that made the missing commits may be alive, and still be connected to the former primary.
        not_before = _prior_leader_gone_at(meta, candidacy, replica, node, now)
        return Decision(Action.ACQUIRE, not_before, rolled_back=True, delayed=delayed)
    lost_leader_gone_at = _lost_leader_gone_at(meta, candidacy, node)
    return Decision(Action.ACQUIRE, None if now >= lost_leader_gone_at else lost_leader_gone_at, delayed=delayed)


def _on_expired_lease(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica, now: float) -> Decision:
    """Decide what to do after the leader has committed nothing for the duration of its lease."""
    if meta is None or meta.epoch != candidacy.expired_epoch:
        return Decision(Action.READ_AGAIN)
    if not replica.read_history.contains(meta.position):
        return Decision(Action.LOAD_SNAPSHOT)  # the log is lost, or truncated
    # A Redis at which a leader was seen alive lacks no acknowledged commits, so no candidate can have a higher rank.
    not_before = None if candidacy.has_seen_leader else now
    return Decision(Action.ACQUIRE, not_before, delayed=True)


def _prior_leader_gone_at(meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> float:
    """Return the event-loop time after which this candidate may replace a leader whose commits Redis lacks.

    By then the lease of that leader has expired, and candidates of a higher rank had time to take over.
    """
    lease_s = (meta.node or node).lease_ms / 1000
    return candidacy.sign_of_life_at(meta, now) + lease_s + rank_delay_s(meta, candidacy, replica)


# -- Leadership balancing -----------------------------------------------------------------------------

DELAY_PER_NAMESPACE_S = 0.1
"""Election delay for each namespace that this node leads, plus the same for each that it leads more than the least loaded
node."""
MAX_DELAY_S = 0.5
"""The limit of each of these two parts, because a node may lead many namespaces."""
TRANSFERRED_DELAY_S = 1.0
"""Additional election delay for a namespace that this node has just transferred, so that it does not win it again."""
MIN_IMBALANCE = 2
"""A node transfers a namespace if it leads at least this many more than the receiver. With a difference of one, the transfer
would only exchange their roles."""


class LeadershipBalancer:
    """Records which node leads each namespace that this node serves, and decides about transfers. A node is identified by
    its address.

    Leadership is balanced without a coordinator, by two rules:

    - Election delay: the more namespaces a node leads, the longer it waits before it competes for a vacant one.
    - Transfer: a node that leads at least two namespaces fewer than another node requests one of them. The leader, which
      polls for such requests, resigns.

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
            self._transferred.pop(namespace, None)

    def count(self, address: str) -> int:
        """Return how many namespaces the node at `address` leads."""
        return sum(leader == address for leader in self._leaders.values())

    def election_delay_s(self, own_address: str, namespace: str) -> float:
        """Return how long this node, at address `own_address`, waits before it competes for a vacant namespace.

        The delay grows with the number of namespaces that this node leads, and with the difference to the node that leads the
        fewest; both parts are limited. For a namespace that this node has just transferred, the delay is longer.
        """
        count = self.count(own_address)
        surplus = count - min(Counter(self._leaders.values()).values(), default=0)
        delay_s = min(DELAY_PER_NAMESPACE_S * count, MAX_DELAY_S)
        if count:  # without a namespace, the surplus is negative or 0
            delay_s += min(DELAY_PER_NAMESPACE_S * surplus, MAX_DELAY_S)
        return delay_s + (TRANSFERRED_DELAY_S if namespace in self._transferred else 0)

    def start_transfer(self, namespace: str, own_address: str, receiver: str, receiver_count: int) -> bool:
        """Record that this node, at `own_address`, transfers a namespace to the node at `receiver`. Return whether it may do
        so.

        Returns False if the difference between the two nodes is less than `MIN_IMBALANCE`. `receiver_count` is how many
        namespaces the receiver led when it sent the request. Namespaces whose transfer to the receiver has already begun
        count as led by the receiver, so that repeated requests do not transfer too many.
        """
        transferred_count = sum(address == receiver for address in self._transferred.values())
        receiver_count = max(receiver_count, self.count(receiver) + transferred_count)
        if receiver == own_address or self.count(own_address) - receiver_count < MIN_IMBALANCE:
            return False
        self.set_leader(namespace, None)
        self._transferred[namespace] = receiver
        return True

    def namespace_to_request(self, own_address: str) -> str | None:
        """Return the namespace that this node, at `own_address`, should request from the node that leads the most.

        Return None if that node leads fewer than `MIN_IMBALANCE` namespaces more than this node.

        The choice depends on a hash of `own_address` and the namespace, so that different nodes request different namespaces.
        """
        counts = Counter(self._leaders.values())
        busiest, max_count = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if max_count - counts[own_address] < MIN_IMBALANCE:
            return None
        candidates = [namespace for namespace, leader in self._leaders.items() if leader == busiest]
        return min(candidates, key=lambda namespace: blake2b(f"{own_address} {namespace}".encode()).digest())
