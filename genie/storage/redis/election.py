"""Leader election without a coordinator, and the balancing of leadership over the nodes.

`decide` is a pure function: it returns what a candidate does next, given what it has read and replicated. It neither waits
nor calls Redis; `follower.py` executes its decisions. Candidates are ranked: first the last leader, whose lease may still be valid;
then the candidate that has replicated the most acknowledged commits; among equals, the node that leads the fewest
namespaces. The rank is expressed in time: a lower rank waits longer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from typing import NamedTuple

from genie.storage.redis.keyspace import LeaderEpoch, Meta
from genie.storage.redis.replica import LocalReplica
from genie.storage.store import Node

RECOVERY_GRACE_S = 1.0
"""How much longer than a lease each lower rank waits where Redis may have lost commits: longer than a node of the rank above
pauses between two attempts to connect."""


class Action(Enum):
    """What a candidate does next."""

    READ_AGAIN = auto()
    """Read `meta` again: the leader has changed since its lease expired."""
    LOAD_SNAPSHOT = auto()
    """Load all records: this node has no replica, or the log does not continue it."""
    DISCARD_REPLICA = auto()
    """Split brain: two leaders diverged. The surviving Redis wins, so the local replica is discarded."""
    TAIL_LOG = auto()
    """Follow the leader until its lease expires."""
    ACQUIRE = auto()
    """Acquire leadership from the stored state, restoring what Redis lacks of it."""
    RESTORE = auto()
    """Redis is empty: restore the snapshot that this node has, and lead."""


class Decision(NamedTuple):
    """The next action. The other fields are the conditions of acquiring leadership: which waits precede it."""

    action: Action
    not_before: float | None = None
    """Event-loop time until which candidates of a higher rank may take over. Until then, and once more at that time, the
    candidate compares its position with those of the others. None: no other candidate can have a better claim."""
    rolled_back: bool = False
    """Redis lacks, or may lack, commits that were replicated here: the wait counts from when that was first observed."""
    delayed: bool = False
    """The candidate waits for the election delay, so that nodes that lead fewer namespaces win."""
    unmoved: bool = False
    """Acquire only if the leader has not committed since `meta` was read."""


@dataclass
class Candidacy:
    """What a candidate has observed of a namespace, and when (event-loop time, seconds)."""

    last_sign_of_life: float
    """When a leader was last observed to be alive; initially, when this node last connected to Redis."""
    has_seen_leader: bool
    """A leader was seen alive at this Redis. Until then this Redis may be a replacement that lacks acknowledged commits.
    True from the start where the primary cannot change."""
    empty_since: float | None = None
    """Since when the namespace is observed to be empty."""
    rollback: tuple[LeaderEpoch, int] | None = None
    """The last stored position (epoch, index) that lacked commits that are replicated here."""
    expired: LeaderEpoch | None = None
    """The epoch whose lease has just expired, according to the log."""

    def reset(self, now: float, *, primary_may_change: bool) -> None:
        """Start observing again after Redis was unreachable. So it may have been for the leader: its lease starts again."""
        self.last_sign_of_life = now
        self.empty_since = self.expired = None
        self.has_seen_leader = not primary_may_change

    def note_rollback(self, meta: Meta, now: float) -> None:
        """Start a new lease for the leader of the commits that Redis lacks, the first time Redis is at this position."""
        if self.rollback != (meta.epoch, meta.index):
            self.rollback = meta.epoch, meta.index
            self.last_sign_of_life = now

    def sign_of_life_at(self, meta: Meta, now: float) -> float:
        """Return the value that `last_sign_of_life` has after `note_rollback(meta, now)`."""
        return self.last_sign_of_life if self.rollback == (meta.epoch, meta.index) else now


def is_vacant(meta: Meta, candidacy: Candidacy, node: Node) -> bool:
    """Return whether the leader stored in `meta` cannot be alive: it has resigned, or was this node before its restart.

    The latter counts only if a leader was seen alive at this Redis: a new primary may lack the takeover of a later leader.
    """
    return meta.node is None or (candidacy.has_seen_leader and node.is_restart_of(meta.node))


def rank_delay_s(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica) -> float:
    """Return how much longer than a lease this candidate waits, by its rank.

    1. The node that led last, as far as it knows: no delay.
    2. A node that has replicated commits that Redis lacks.
    3. Any other node, if no leader was seen alive at this Redis, which may have replaced one with more commits.
    """
    if replica.has_led_last:
        return 0.0
    if replica.history is not None and (meta is None or replica.has_commits_missing_from(meta.history)):
        return RECOVERY_GRACE_S
    return 0.0 if candidacy.has_seen_leader else 2 * RECOVERY_GRACE_S


def decide(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> Decision:
    """Return what a candidate does next. `meta` was just read; it is None if the namespace is empty."""
    if candidacy.expired is not None:
        return _on_expired_lease(meta, candidacy, replica, now)
    if meta is None:
        return _on_empty(candidacy, replica, node, now)
    diverged = replica.read_history.position > (0, 0) and not meta.history.contains(replica.read_history.position)
    handle = _on_vacant if is_vacant(meta, candidacy, node) else _on_leader
    return handle(meta, candidacy, replica, node, now, diverged=diverged)


def _on_leader(
    meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float, *, diverged: bool
) -> Decision:
    """Decide where `meta` names a leader that may be alive. `diverged`: the replica is not on the stored lineage."""
    if not replica.is_loaded:
        return Decision(Action.LOAD_SNAPSHOT)
    lacks_commits = replica.has_commits_missing_from(meta.history)
    if diverged and not lacks_commits:
        return Decision(Action.DISCARD_REPLICA)
    if lacks_commits and (diverged or not candidacy.has_seen_leader):
        # Redis rolled back. The leader restores the snapshot; if it has not within a lease, this node does.
        until = _until_prior_leader_gone(meta, candidacy, replica, node, now)
        return Decision(Action.ACQUIRE, until, rolled_back=True, unmoved=True)
    return Decision(Action.TAIL_LOG)


def _on_empty(candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> Decision:
    """Decide where the namespace is new, or Redis has lost everything: wait for a lease, as a living leader restores it."""
    since = now if candidacy.empty_since is None else candidacy.empty_since
    until = since + node.lease_ms / 1000 + rank_delay_s(None, candidacy, replica)
    history = replica.history
    action = Action.RESTORE if history is not None and history.position > (0, 0) else Action.ACQUIRE
    return Decision(action, until, delayed=True)


def _on_vacant(
    meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float, *, diverged: bool
) -> Decision:
    """Decide where the stored leader has resigned, or was this node before its restart (`is_vacant`)."""
    if not candidacy.has_seen_leader and not replica.is_loaded:
        return Decision(Action.LOAD_SNAPSHOT)
    delayed = meta.node is None
    if diverged or not candidacy.has_seen_leader:
        # The leader of the commits that Redis lacks may be alive, and not know yet that another Redis is the primary.
        until = _until_prior_leader_gone(meta, candidacy, replica, node, now)
        return Decision(Action.ACQUIRE, until, rolled_back=True, delayed=delayed)
    return Decision(Action.ACQUIRE, delayed=delayed)


def _on_expired_lease(meta: Meta | None, candidacy: Candidacy, replica: LocalReplica, now: float) -> Decision:
    """Decide after the log has shown no commit for the duration of the leader's lease."""
    if meta is None or meta.epoch != candidacy.expired:
        return Decision(Action.READ_AGAIN)
    if not replica.read_history.contains(meta.position):
        return Decision(Action.LOAD_SNAPSHOT)  # the log is lost, or truncated
    return Decision(Action.ACQUIRE, None if candidacy.has_seen_leader else now, delayed=True, unmoved=True)


def _until_prior_leader_gone(meta: Meta, candidacy: Candidacy, replica: LocalReplica, node: Node, now: float) -> float:
    """Return when the leader of the commits that Redis lacks has lost its lease and higher ranks had time to take over."""
    lease_s = (meta.node or node).lease_ms / 1000
    return candidacy.sign_of_life_at(meta, now) + lease_s + rank_delay_s(meta, candidacy, replica)


# -- Leadership balancing -----------------------------------------------------------------------------

DELAY_PER_NAMESPACE_S = 0.1
"""Election delay for each namespace that this node leads, and again for each more than the node that leads fewest."""
MAX_DELAY_S = 0.5
"""The limit of either part: nodes may lead many namespaces, and the one that leads fewest need not wait longer."""
TRANSFERRED_DELAY_S = 1.0
"""Additional delay for a namespace that this node has just transferred: otherwise it could win the election again."""
MIN_IMBALANCE = 2
"""A node transfers a namespace if it leads at least this many more: with a difference of one the roles would only swap."""


class LeadershipBalancer:
    """Records which node leads which of the namespaces that this node serves, and decides about transfers. Nodes are
    identified by their addresses.

    Leadership is balanced without a coordinator, by two rules. Election delay: before a node competes for a vacant
    namespace it waits, the longer the more it leads, so idle nodes win. Transfer: a node that leads at least two namespaces
    fewer than another requests one of them, and the leader, which polls for requests, resigns. So nodes that serve the same
    namespaces end with a difference of at most one, and transfers stop.
    """

    def __init__(self) -> None:
        self._leaders: dict[str, str] = {}
        self._transferred: dict[str, str] = {}
        """Namespaces that this node has transferred, with the receiver, until their new leader is known."""

    def set_leader(self, namespace: str, address: str | None) -> None:
        """Record which node leads a namespace; None: unknown."""
        if address is None:
            self._leaders.pop(namespace, None)
        else:
            self._leaders[namespace] = address
            self._transferred.pop(namespace, None)

    def count(self, address: str) -> int:
        """Return how many namespaces a node leads."""
        return sum(leader == address for leader in self._leaders.values())

    def election_delay_s(self, own: str, namespace: str) -> float:
        """Return how long the node at address `own` waits before it competes for a vacant namespace.

        The delay grows with the namespaces that it leads, and with those that it leads more than the least loaded node.
        """
        count = self.count(own)
        surplus = count - min(Counter(self._leaders.values()).values(), default=0)
        delay_s = min(DELAY_PER_NAMESPACE_S * count, MAX_DELAY_S)
        if count:
            delay_s += min(DELAY_PER_NAMESPACE_S * surplus, MAX_DELAY_S)
        return delay_s + (TRANSFERRED_DELAY_S if namespace in self._transferred else 0)

    def start_transfer(self, namespace: str, own: str, other: str, count: int) -> bool:
        """Decide whether node `own` transfers a namespace to node `other`, which led `count` when it asked; record it if so.

        Namespaces that are being transferred to `other` count as led by it: if it asks again before it has taken over the
        first one, it gets no second.
        """
        transferred = sum(receiver == other for receiver in self._transferred.values())
        if other == own or self.count(own) - max(count, self.count(other) + transferred) < MIN_IMBALANCE:
            return False
        self.set_leader(namespace, None)
        self._transferred[namespace] = other
        return True

    def namespace_to_request(self, own: str) -> str | None:
        """Return the namespace that the node at address `own` should request from the most loaded node; None if balanced.

        Nodes choose by a hash that includes their own address, so that they request different namespaces.
        """
        counts = Counter(self._leaders.values())
        busiest, max_count = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if max_count - counts[own] < MIN_IMBALANCE:
            return None
        candidates = [namespace for namespace, leader in self._leaders.items() if leader == busiest]
        return min(candidates, key=lambda namespace: blake2b(f"{own} {namespace}".encode()).digest())
