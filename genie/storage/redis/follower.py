"""Follow a namespace until this node leads it: tail the log into a local replica, so that a takeover needs no loading.

The leader has a lease: it may act for that long after sending each of its commits, and an idle leader commits a heartbeat.
Clocks of different nodes are never compared. A follower counts the lease from when it has read a commit, which is later
than when the leader sent it. The script that acquires leadership fails if the leader has committed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from math import ceil, inf

import structlog

from genie.storage.redis.election import (
    Action,
    Candidacy,
    Decision,
    LeadershipBalancer,
    decide,
    is_vacant,
    rank_delay_s,
)
from genie.storage.redis.keyspace import Keyspace, Meta
from genie.storage.redis.log import (
    MAX_READ_ENTRIES,
    BatchCommitted,
    EpochStarted,
    LogEntry,
    LogReader,
    LogTruncated,
    Position,
)
from genie.storage.redis.replica import LocalReplica, PriorLeadership, Snapshot, load_snapshot
from genie.storage.store import LeadershipLost, Node, StateMachine

log = structlog.get_logger()

MAX_READ_WAIT_MS = 1_000
"""How long one read of the log may block: Redis may have crashed, or be unreachable, without closing the connection."""
READ_PAUSE_S = 0.01
"""Pause between two reads of a busy log, so that following does not cost Redis as much as the commits."""
TRANSFER_REQUEST_INTERVAL_S = 1.0
"""How often a transfer request is repeated."""
POLL_INTERVAL_S = 0.1
"""How often a waiting candidate reads `meta` and compares positions."""


class Follower:
    """One namespace on a node that does not lead it.

    `on_leader_changed` gets the leader's address, or None. `led` is what this node knows from when it led, and
    `unacknowledged` are batches that it sent then without acknowledging them to clients.
    """

    def __init__(
        self,
        keyspace: Keyspace,
        reader: LogReader,
        node: Node,
        balancer: LeadershipBalancer,
        on_leader_changed: Callable[[str | None], None],
        led: PriorLeadership | None = None,
        unacknowledged: Collection[Position] = (),
    ) -> None:
        self._log = log.bind(namespace=keyspace.name)
        self._keyspace = keyspace
        self._reader = reader
        self._node = node
        self._balancer = balancer
        self._on_leader_changed = on_leader_changed
        self._loop = asyncio.get_running_loop()
        self._replica = LocalReplica(reader, led, unacknowledged)
        self._candidacy = Candidacy(self._loop.time(), not keyspace.primary_may_change)
        self._requested_transfer_at = -inf
        self._has_acquired = False
        self.acquired_at = 0.0
        """When this node began to acquire leadership (event-loop time): its first lease counts from there."""

    def on_store_failure(self) -> None:
        """Start observing again: Redis could not be reached."""
        self._candidacy.reset(self._loop.time(), primary_may_change=self._keyspace.primary_may_change)
        self._set_leader(None)

    async def run(self) -> StateMachine:
        """Follow until this node leads, and return the state. After an error, call it again to continue."""
        while True:
            state_machine = await self._step()
            if state_machine is not None:
                await self._keyspace.collect_garbage()
                self._balancer.set_leader(self._keyspace.name, self._node.address)
                return state_machine

    async def _step(self) -> StateMachine | None:
        """Read `meta`, decide, and execute the decision. Returns the state once this node has acquired leadership."""
        meta = await self._read_meta()
        decision = decide(meta, self._candidacy, self._replica, self._node, self._loop.time())
        expired, self._candidacy.expired = self._candidacy.expired, None
        match decision.action:
            case Action.LOAD_SNAPSHOT:
                await self._load()
            case Action.DISCARD_REPLICA:
                self._log.warning("replica diverged from primary, discarding it")
                self._replica.discard()
            case Action.TAIL_LOG if meta is not None and meta.node is not None:
                await self._tail_log(meta, meta.node)
            case Action.ACQUIRE | Action.RESTORE:
                return await self._compete(decision, meta, lease_expired=expired is not None)
        return None

    def _set_leader(self, leader: str | None) -> None:
        """Record the leader's address, or None if it is unknown, and notify the server."""
        self._balancer.set_leader(self._keyspace.name, leader)
        self._on_leader_changed(leader)

    async def _read_meta(self) -> Meta | None:
        """Read `meta`, and record who leads, or since when the namespace is empty. Returns None if it is empty."""
        meta, candidacy = await self._keyspace.read(), self._candidacy
        if candidacy.expired is not None:
            return meta
        if meta is None:
            self._set_leader(None)
            was_unregistered = await self._keyspace.register_candidate()
            if was_unregistered or candidacy.empty_since is None:
                # The first call, or Redis has lost data since the last one: another node may have led, and be alive.
                candidacy.empty_since = self._loop.time()
            return None
        candidacy.empty_since = None
        if meta.node is not None and not is_vacant(meta, candidacy, self._node):
            self._set_leader(None if self._node.is_restart_of(meta.node) else meta.node.address)
        return meta

    # -- following ----------------------------------------------------------------------------------------

    async def _tail_log(self, meta: Meta, leader: Node) -> None:
        """Replicate the log until the lease of `leader` expires, or `meta` must be read again."""
        candidacy = self._candidacy
        lease_s = leader.lease_ms / 1000
        wait_s = lease_s + rank_delay_s(meta, candidacy, self._replica)
        while True:
            left_s = candidacy.last_sign_of_life + wait_s - self._loop.time()
            entries = await self._read_log(min(ceil(left_s * 1000), MAX_READ_WAIT_MS) if left_s > 0 else None)
            if entries is None:
                return
            if not entries and left_s <= 0:
                candidacy.expired = meta.epoch
                return
            for entry in entries:
                candidacy.last_sign_of_life = self._loop.time()
                if entry.position > meta.position:  # an older entry may have come with the state of another Redis
                    candidacy.has_seen_leader, wait_s = True, lease_s
                    self._replica.discard_own_leadership_state()
                if isinstance(entry, EpochStarted) or entry.resigned:
                    return
            if not entries and not await self._check_unchanged(meta):
                return
            await self._request_transfer()
            if 0 < len(entries) < MAX_READ_ENTRIES:
                await asyncio.sleep(READ_PAUSE_S)

    async def _read_log(self, wait_ms: int | None) -> list[LogEntry] | None:
        """Read the next log entries and apply them to the replica.

        Returns None if the snapshot had to be loaded instead: another node may have taken over since.
        """
        try:
            entries = await self._reader.read(wait_ms)
        except LogTruncated:
            self._log.info("log truncated, loading snapshot")
            await self._load()
            return None
        for entry in entries:
            if isinstance(entry, BatchCommitted):
                self._replica.append(entry)
        return entries

    async def _check_unchanged(self, meta: Meta) -> bool:
        """Return whether Redis still has the epoch of `meta` and everything replicated: the log does not show a rollback."""
        stored = await self._keyspace.read()
        return stored is not None and stored.epoch == meta.epoch and stored.index >= self._reader.position[1]

    async def _request_transfer(self) -> None:
        """Ask the leader to transfer the namespace, if it leads too many; at most once per interval."""
        now, name = self._loop.time(), self._keyspace.name
        due = now - self._requested_transfer_at >= TRANSFER_REQUEST_INTERVAL_S
        if due and self._balancer.namespace_to_request(self._node.address) == name:
            self._requested_transfer_at = now
            if not await self._keyspace.is_discoverable():
                return  # this node could not connect as the leader, and would lose the namespace again
            await self._keyspace.request_transfer(self._node.address, self._balancer.count(self._node.address))

    async def _load(self) -> None:
        """Replace the replica by the stored state.

        If loading is interrupted there is no replica: the old one does not match the position of the log reader.
        """
        self._replica.unload()
        state = await load_snapshot(self._keyspace, self._reader, self._log)
        if state is None:
            return
        self._candidacy.last_sign_of_life = self._loop.time()  # what was read may be recent
        state_machine = StateMachine()
        state_machine.apply(state)
        self._replica.replace(state_machine)
        if not self._has_acquired:
            self._log.info("replica caught up", held_locks=state_machine.manager.table.locks)

    # -- taking over --------------------------------------------------------------------------------------

    async def _compete(self, decision: Decision, meta: Meta | None, *, lease_expired: bool) -> StateMachine | None:
        """Acquire leadership under the conditions of the decision. Returns the state; None if another decision is needed.

        `lease_expired`: the lease of the leader in `meta` has expired, which is logged.
        """
        if decision.rolled_back and meta is not None:
            self._candidacy.note_rollback(meta, self._loop.time())
        if decision.not_before is not None and not await self._wait_for_higher_ranks(decision.not_before):
            return None
        if lease_expired and meta is not None and meta.node is not None:
            self._log.warning("leader lease expired", leader=meta.node.address, lease_ms=meta.node.lease_ms)
        if decision.delayed and not await self._wait_election_delay(meta):
            return None
        if decision.action is Action.RESTORE:
            snapshot = self._replica.snapshot()
            assert snapshot is not None, "RESTORE is only decided with a local state"  # noqa: S101
            await self._keyspace.verify()
            return await self._restore(snapshot)
        state_machine = await self._acquire(meta, unmoved=decision.unmoved)
        if lease_expired:
            self._candidacy.last_sign_of_life = self._loop.time()
        return state_machine

    async def _wait_for_higher_ranks(self, until: float) -> bool:
        """Publish this node's position and wait for a poll interval, or until the time `until`.

        Returns whether `until` has passed and no candidate has published a later position.
        """
        history = self._replica.history
        position = (0, 0) if history is None else history.last_committed
        outranked = await self._keyspace.publish_position_and_compare(position)
        left_s = until - self._loop.time()
        if outranked or left_s > 0:
            await asyncio.sleep(POLL_INTERVAL_S if outranked else min(left_s, POLL_INTERVAL_S))
            return False
        return True

    async def _wait_election_delay(self, meta: Meta | None) -> bool:
        """Wait, so that nodes that lead fewer namespaces can take over; return whether `meta` is still current."""
        self._balancer.set_leader(self._keyspace.name, None)
        delay_s = self._balancer.election_delay_s(self._node.address, self._keyspace.name)
        if not delay_s:
            return True
        await asyncio.sleep(delay_s)
        stored = await self._keyspace.read()
        return (stored and stored.position) == (meta and meta.position)

    async def _acquire(self, meta: Meta | None, *, unmoved: bool) -> StateMachine | None:
        """Acquire leadership, and return the state to lead from; None if another node was faster.

        After the acquisition no earlier leader can commit any more, so the missing log entries can be read completely.
        """
        await self._keyspace.verify()  # last: another Redis may have become the primary while this node waited
        self.acquired_at = self._loop.time()
        base = await self._keyspace.acquire_leadership(self._node, meta, unmoved=unmoved)
        if base is None:
            return None
        self._has_acquired = True
        history = self._keyspace.history
        missing = self._replica.missing_from(history)
        if missing is not None:
            # Redis has a new epoch on top of its old state. The local state continues that epoch, also if restoring fails.
            snapshot = Snapshot(missing.history.advanced_to((self._keyspace.epoch.number, 1)), missing.state)
            self._replica.keep_only(snapshot)
            return await self._restore(snapshot)
        has_unacknowledged = self._reader.history.has_commits_beyond(
            history
        )  # Redis lacks them, and no client saw them
        if not self._replica.is_loaded or has_unacknowledged or not await self._catch_up_to(base):
            await self._load()
        replica = self._replica.lazy
        self._has_acquired = replica is not None  # None: Redis lost everything again, so there is no state to lead from
        return None if replica is None else replica.state_machine()

    async def _catch_up_to(self, base: Position) -> bool:
        """Replicate the log up to `base`, where the last leader stopped; return whether the log reaches it."""
        while not self._reader.history.contains(base):
            if await self._read_log(None) == []:
                return False
        return True

    async def _restore(self, snapshot: Snapshot) -> StateMachine | None:
        """Acquire leadership with a snapshot: it has acknowledged commits that Redis has lost. None if another was faster."""
        self._log.warning("primary lacks acknowledged commits, restoring snapshot")
        self.acquired_at = self._loop.time()
        try:
            await self._keyspace.restore_snapshot(self._node, snapshot.state, snapshot.history)
        except LeadershipLost as error:
            self._log.info("snapshot restore abandoned, another node leads", reason=str(error))
            self._has_acquired = False
            return None
        self._has_acquired = True
        state_machine = StateMachine()
        state_machine.apply(snapshot.state)
        return state_machine
