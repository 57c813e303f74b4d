"""Follows a namespace until this node leads it: applies the log to a local replica, so that a takeover needs no loading.

The leader has a lease: it may act for the duration of the lease after it sent a commit. An idle leader commits a heartbeat.
A follower measures the lease from the moment at which it has read the commit. That is later than the moment of sending, and
clocks of different nodes are never compared. The script that acquires leadership fails if the leader has committed in the
meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from math import ceil, inf

import structlog

from genie.roles import FollowerRole, Following, StoreOutage, StoreUnavailable, Waiting
from genie.storage.redis.connection import RedisFailure
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
    LogIncomplete,
    LogReader,
    LogTruncated,
    Position,
    encode_position,
)
from genie.storage.redis.outage import OutageLog
from genie.storage.redis.replica import LocalReplica, PriorLeadership, Snapshot, load_state
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine

log = structlog.get_logger()

MAX_READ_WAIT_MS = 1_000
"""How long one read of the log may block. Limited, because a Redis that crashed may not have closed the connection."""
PARTS_OF_SMALL_STATE = 2
"""How many parts a small state has. It is loaded in one iteration of the event loop."""
READ_PAUSE_S = 0.01
"""Pause between two reads of a busy log, so that following does not cost Redis as much as the commits."""
INCOMPLETE_LOG_PAUSE_S = 5.0
"""Pause before the state is loaded again if the log lacks entries. In this time a leader usually writes a checkpoint."""
TRANSFER_REQUEST_INTERVAL_S = 1.0
"""How often a transfer request is repeated."""
POLL_INTERVAL_S = 0.1
"""How often a waiting candidate reads `meta` and compares positions."""
MAX_POLL_S = 0.5
"""If Redis takes longer to answer such a poll, the candidate starts its wait again."""


class Follower:
    """Follows one namespace until this node has acquired leadership.

    `on_role_changed` is called with each new role of this node until it leads. `prior_leadership` is the state of this
    node as a former leader, if it has led. `unacknowledged` are the positions of batches that this node sent as the
    leader without acknowledging them to clients. An outage in `outage_log` ends when this node reads the log again.
    """

    def __init__(
        self,
        keyspace: Keyspace,
        reader: LogReader,
        node: Node,
        balancer: LeadershipBalancer,
        outage_log: OutageLog,
        on_role_changed: Callable[[FollowerRole], None],
        prior_leadership: PriorLeadership | None = None,
        unacknowledged: Collection[Position] = (),
    ) -> None:
        # More than 16 fields: the arguments, and what this node has observed of the leader. Each step reads most of
        # them.
        self._log = log.bind(namespace=keyspace.name)
        self._keyspace = keyspace
        self._reader = reader
        self._node = node
        self._balancer = balancer
        """Knows how many namespaces each node leads."""
        self._outage_log = outage_log
        self._on_role_changed = on_role_changed
        self._role: FollowerRole | None = None
        """The last reported role. None before the first report."""
        self._leader: str | None = None
        """The leader's address. None if the leader is unknown."""
        self._may_lag = False
        """True if Redis could not be reached, until this node has read the log to its end again."""
        self._loop = asyncio.get_running_loop()
        self._replica = LocalReplica(reader, prior_leadership, unacknowledged)
        self._candidacy = Candidacy(
            last_sign_of_life=self._loop.time(), has_seen_leader=not keyspace.primary.may_change
        )
        self._requested_transfer_at = -inf
        """When this node last requested a transfer (event-loop time)."""
        self._logged_load_error = ""
        """The last logged error of a load. Empty if the last load succeeded."""
        self._has_acquired = False
        """True if this step has acquired leadership. This node may still have to load the state from which to lead."""
        self.acquired_state: StateMachine | None = None
        """The state from which this node leads. None until the node has acquired leadership and loaded the state."""
        self.acquired_at = 0.0
        """When this node began to acquire leadership (event-loop time). Its first lease starts at that time."""

    def on_store_failure(self, outage: StoreOutage) -> None:
        """Discard the observations of the leader, because Redis could not be reached, and report the outage.

        The leader is unknown until `meta` is read again, and the wait for the end of its lease begins again.
        """
        self._candidacy.reset(self._loop.time(), primary_may_change=self._keyspace.primary.may_change)
        self._balancer.set_leader(self._keyspace.name, None)
        self._leader, self._may_lag = None, True
        self._report(StoreUnavailable(outage))

    def drop_state(self) -> None:
        """Drop the state, in parts, because this node leads with it: its requests would be kept in memory after their end."""
        self.acquired_state = None
        self._replica.discard()

    async def run(self) -> StateMachine:
        """Follow until this node leads, and return the state.

        If `run` raises an error, call it again: the replica is kept, so it need not be loaded again.
        """
        while True:
            state_machine = await self._step()
            if state_machine is not None:
                self.acquired_state = state_machine  # first: a cancelled `run` must still be able to resign
                try:
                    await self._keyspace.collect_garbage()
                except RedisFailure as error:  # not fatal: leadership is already acquired
                    self._log.warning("unused key deletion failed, leaving it to the next leader", reason=str(error))
                self._balancer.set_leader(self._keyspace.name, self._node.address)
                return state_machine

    async def _step(self) -> StateMachine | None:
        """Read `meta`, decide what to do next, and do it.

        Returns the state if this node has acquired leadership. Otherwise returns None, and `_step` must be called
        again.
        """
        started_at = self._loop.time()
        self._has_acquired = False  # an acquisition whose `_take_over` has failed is repeated
        meta = await self._keyspace.read()
        primary = self._keyspace.primary
        self._candidacy.note_run(primary.run, meta, primary_may_change=primary.may_change)
        self._outage_log.on_reached(self._loop.time())
        lease_expired = self._candidacy.expired_epoch is not None
        if not lease_expired:  # otherwise `decide` needs the observations from before
            await self._observe(meta)
        if self._keyspace.confirm_acquisition(meta):
            return await self._take_over()
        decision = decide(meta, self._candidacy, self._replica, self._node, self._loop.time())
        self._candidacy.expired_epoch = None
        match decision.action:
            case Action.LOAD_SNAPSHOT:
                await self._load_replica()
            case Action.DISCARD_REPLICA:
                self._log.warning("state of this server differs from that in Redis, loading the latter")
                old = self._replica.lazy
                self._replica.discard()
                if old is not None:
                    await old.free()
            case Action.TAIL_LOG if meta is not None and meta.node is not None:
                await self._tail_log(meta, meta.node)
            case Action.ACQUIRE | Action.RESTORE:
                return await self._compete(decision, meta, started_at, lease_expired=lease_expired)
        return None

    def _set_leader(self, leader: str | None) -> None:
        """Record the leader's address, or None if the leader is unknown, and report the role."""
        self._balancer.set_leader(self._keyspace.name, leader)
        self._leader = leader
        self._report_role()

    def _report_role(self) -> None:
        """Report the current role: this node follows a leader, or waits for one."""
        caught_up = self._replica.is_loaded and not self._may_lag
        self._report(Waiting() if self._leader is None else Following(self._leader, caught_up=caught_up))

    def _report(self, role: FollowerRole) -> None:
        """Report a role if it differs from the last reported one."""
        if role != self._role:
            self._role = role
            self._on_role_changed(role)

    async def _observe(self, meta: Meta | None) -> None:
        """Record the leader in `meta`. If `meta` is None, record since when the namespace is empty."""
        candidacy = self._candidacy
        if meta is None:
            self._set_leader(None)
            was_unregistered = await self._keyspace.register_candidate()
            log_end = self._keyspace.log_end
            if was_unregistered or candidacy.empty_since is None or candidacy.empty_log_end != log_end:
                # This is the first call, or Redis has lost data or the log has grown since the last call: a leader may
                # be alive.
                candidacy.empty_since, candidacy.empty_log_end = self._loop.time(), log_end
            return
        candidacy.empty_since = None
        if meta.node is not None and not is_vacant(meta, candidacy, self._replica, self._node, self._loop.time()):
            was_this_node = self._node.is_restart_of(meta.node)
            self._set_leader(None if was_this_node else meta.node.address)
        elif self._leader is None:
            self._report_role()

    # -- following ----------------------------------------------------------------------------------------

    async def _tail_log(self, meta: Meta, leader: Node) -> None:
        """Replicate the log until the lease of `leader` expires, or until `meta` must be read again.

        An expired lease is recorded in `Candidacy.expired_epoch`, after a last read has shown that the log has no
        further entry.
        """
        candidacy = self._candidacy
        lease_s = leader.lease_ms / 1000
        wait_s = lease_s + rank_delay_s(meta, candidacy, self._replica)
        while True:
            remaining_s = candidacy.last_sign_of_life + wait_s - self._loop.time()
            is_expired = remaining_s <= 0
            entries = await self._read_log(None if is_expired else min(ceil(remaining_s * 1000), MAX_READ_WAIT_MS))
            if entries is None:
                return
            if not entries and is_expired:
                candidacy.expired_epoch = meta.epoch
                return
            for entry in entries:
                candidacy.last_sign_of_life = self._loop.time()
                if entry.position > meta.position:  # an older entry is no proof: it may be a copy from another Redis
                    candidacy.has_seen_leader = True
                    wait_s = lease_s
                    self._replica.discard_own_leadership_state()
                if isinstance(entry, EpochStarted) or entry.resigned:
                    return
            if not entries:  # Redis may have been rolled back, which adds no entry to the log
                stored = await self._keyspace.read()
                if stored is None or stored.epoch != meta.epoch or stored.position < self._reader.position:
                    return
            await self._request_transfer()
            is_busy = len(entries) == MAX_READ_ENTRIES
            if entries and not is_busy:
                await asyncio.sleep(READ_PAUSE_S)

    async def _read_log(self, wait_ms: int | None) -> list[LogEntry] | None:
        """Read the next log entries, apply them to the replica, and return them.

        Waits up to `wait_ms` for the first entry, or not at all if `wait_ms` is None. Returns None if the log was
        truncated and the stored state was loaded instead. Then `meta` must be read again.
        """
        try:
            entries = await self._reader.read(wait_ms)
        except LogTruncated:
            self._log.info(
                "replication log truncated, reloading replica", position=encode_position(self._reader.position)
            )
            await self._load_replica()
            return None
        self._outage_log.end(self._keyspace.primary.address, self._loop.time())
        for entry in entries:
            if isinstance(entry, BatchCommitted):
                for _ in self._replica.append(entry):
                    await asyncio.sleep(0)  # let the event loop do other work before the next part
        if self._may_lag and len(entries) < MAX_READ_ENTRIES:
            self._may_lag = False
            self._report_role()
        return entries

    async def _request_transfer(self) -> None:
        """Request this namespace if its leader leads too many namespaces, but at most once per `TRANSFER_REQUEST_INTERVAL_S`.

        Without discovery of the primary this node requests nothing: as the leader it could not connect to commit.
        """
        now, own_address = self._loop.time(), self._node.address
        is_due = now - self._requested_transfer_at >= TRANSFER_REQUEST_INTERVAL_S
        if is_due and self._balancer.namespace_to_request(own_address) == self._keyspace.name:
            self._requested_transfer_at = now
            if await self._keyspace.primary.is_discoverable():
                await self._keyspace.request_transfer(own_address, self._balancer.count(own_address))

    async def _load_replica(self) -> None:
        """Replace the replica by the stored state.

        The replica is not replaced if the namespace is empty, or if the log lacks entries. The next checkpoint replaces
        missing entries, so the caller loads again.
        """
        old, self._replica.lazy = self._replica.lazy, None
        old_history = self._reader.history
        self._report_role()
        state: Batch | None = None
        try:
            state = await load_state(self._keyspace, self._reader, self._log)
            self._logged_load_error = ""
        except LogIncomplete as error:
            if str(error) != self._logged_load_error:
                self._logged_load_error = str(error)
                self._log.error(
                    "loading from Redis failed, retrying", reason=str(error), retry_s=INCOMPLETE_LOG_PAUSE_S
                )
            await asyncio.sleep(INCOMPLETE_LOG_PAUSE_S)
        finally:
            if state is None and old is not None and not self._has_acquired:
                # Redis may have lost commits again that only this replica has. Loading has moved the log reader.
                self._replica.lazy, self._may_lag = old, True
                self._reader.seek(old_history)
        if state is None:
            return
        if old is not None:
            await old.free()
        self._candidacy.last_sign_of_life = self._loop.time()  # the leader may have committed just before
        state_machine = await _apply_state(state)
        self._replica.replace(state_machine)
        self._may_lag = False
        self._report_role()
        if not self._has_acquired:
            self._log.info("replica loaded", held_locks=state_machine.manager.table.locks)

    # -- taking over --------------------------------------------------------------------------------------

    async def _compete(
        self, decision: Decision, meta: Meta | None, started_at: float, *, lease_expired: bool
    ) -> StateMachine | None:
        """Wait as the decision says, then acquire leadership and return the state.

        Returns None if the wait has not ended or another node was faster: the caller then reads `meta` and decides
        again. `started_at` is the event-loop time at which this node began to read `meta`. `lease_expired` says whether
        the lease of the leader in `meta` has expired.
        """
        if decision.rolled_back and meta is not None:
            self._candidacy.note_rollback(meta, self._loop.time())
        if decision.not_before is not None and not await self._poll_for_highest_rank(decision.not_before, started_at):
            return None
        if lease_expired and meta is not None and meta.node is not None:
            self._log.warning("leader lease expired", leader=meta.node.address, lease_ms=meta.node.lease_ms)
        if decision.delayed and not await self._wait_election_delay(meta):
            return None
        if decision.action is Action.RESTORE:
            snapshot = self._replica.snapshot()
            assert snapshot is not None, "RESTORE is only decided with a local state"  # noqa: S101
            await self._keyspace.primary.verify()
            return await self._restore(snapshot, self._candidacy.empty_log_end)
        state_machine = await self._acquire(meta)
        if lease_expired:
            self._candidacy.last_sign_of_life = self._loop.time()
        return state_machine

    async def _poll_for_highest_rank(self, not_before: float, started_at: float) -> bool:
        """Publish this node's position, and return whether it has the highest rank of all candidates.

        Returns True if the event-loop time `not_before` has passed and no candidate has published a later position.
        Otherwise returns False after at most one poll interval: the caller then reads `meta` and decides again.

        The wait gives the other candidates time to publish. If Redis took longer than `MAX_POLL_S` since `started_at`,
        they had no such time, and the wait starts again.
        """
        history = self._replica.history
        position = (0, 0) if history is None else history.last_committed
        outranked = await self._keyspace.publish_position_and_compare(position)
        now = self._loop.time()
        if now - started_at > MAX_POLL_S:
            self._candidacy.note_stall(now)
            return False
        remaining_s = not_before - now
        if outranked or remaining_s > 0:
            await asyncio.sleep(POLL_INTERVAL_S if outranked else min(remaining_s, POLL_INTERVAL_S))
            return False
        return True

    async def _wait_election_delay(self, meta: Meta | None) -> bool:
        """Wait for the election delay, in which nodes that lead fewer namespaces can take over.

        Returns whether the namespace is still as in `meta`, so that no other node has taken over.
        """
        self._balancer.set_leader(self._keyspace.name, None)
        delay_s = self._balancer.election_delay_s(self._node.address, self._keyspace.name)
        if not delay_s:
            return True
        await asyncio.sleep(delay_s)
        log_end = self._keyspace.log_end  # `read` replaces it
        stored = await self._keyspace.read()
        position = None if meta is None else meta.position
        stored_position = None if stored is None else stored.position
        return stored_position == position and self._keyspace.log_end == log_end

    async def _acquire(self, meta: Meta | None) -> StateMachine | None:
        """Acquire leadership, and return the state to continue from.

        Returns None if another node was faster, or the leader has committed since `meta` was read. Raises
        UnknownFormat, without a change, if the log has a record that this version of Genie does not know.
        """
        if self._replica.is_loaded and meta is not None and meta.history.contains(self._reader.position):
            await self._catch_up_to(meta.position)
        await self._replica.apply()
        await self._keyspace.primary.verify()  # last: another Redis may have become the primary while this node waited
        self.acquired_at = self._loop.time()
        if not await self._keyspace.acquire_leadership(self._node, meta):
            # A leader is alive. `_catch_up_to` may have read its entries, which `_tail_log` then will not see.
            self._candidacy.last_sign_of_life = self._loop.time()
            return None
        return await self._take_over()

    async def _take_over(self) -> StateMachine | None:
        """Return the state with which to lead after the acquisition, or None if Redis has lost everything since then.

        No earlier leader can commit any more, so the replica applies the rest of the log. If Redis lacks acknowledged
        commits that this node has, they are restored.
        """
        self._has_acquired = True
        history = self._keyspace.history
        base = history.ends[-2]  # the position from which the new epoch continues
        missing = self._replica.missing_from(history)
        if missing is not None:
            # Redis now has a new epoch after its rolled-back state. Record that the local state follows this epoch, so
            # that restoring can be repeated if it fails.
            snapshot = Snapshot(missing.history.advanced_to((self._keyspace.epoch.number, 1)), missing.state)
            self._replica.keep_only(snapshot)
            return await self._restore(snapshot)
        # Any commit that Redis lacks was acknowledged to no client. A replica that contains such a commit is loaded
        # again.
        has_unacknowledged = self._reader.history.has_commits_beyond(history)
        if not self._replica.is_loaded or has_unacknowledged or not await self._catch_up_to(base):
            await self._load_replica()
        await self._replica.apply()
        replica = self._replica.lazy
        self._has_acquired = replica is not None
        return None if replica is None else replica.state_machine()

    async def _catch_up_to(self, position: Position) -> bool:
        """Apply log entries until the replica contains `position`. Return False if the log ends before `position`."""
        while not self._reader.history.contains(position):
            entries = await self._read_log(wait_ms=None)
            was_reloaded = entries is None  # then the replica may contain `position`
            if not was_reloaded and not entries:
                return False
        return True

    async def _restore(self, snapshot: Snapshot, log_end: str | None = None) -> StateMachine | None:
        """Acquire leadership by writing `snapshot` to Redis, which has lost acknowledged commits that the snapshot contains.

        Returns the state of the snapshot, or None if another node was faster. If `log_end` is not None, the namespace was empty,
        and its log must still end with the entry of this id.
        """
        address = self._keyspace.primary.address
        self._log.warning(
            "Redis lost acknowledged commits, writing the state of this server to it", address=address and str(address)
        )
        self.acquired_at = self._loop.time()
        try:
            await self._keyspace.restore_snapshot(self._node, snapshot.state, snapshot.history, log_end)
        except LeadershipLost as error:
            self._log.info("snapshot restore abandoned, another node leads", reason=str(error))
            self._has_acquired = False
            return None
        self._has_acquired = True
        return await _apply_state(snapshot.state)


async def _apply_state(state: Batch) -> StateMachine:
    """Return a new state machine with a whole state. Other tasks run between the parts of a large state."""
    state_machine = StateMachine()
    for number, _ in enumerate(state_machine.apply_in_parts(state), 1):
        if number > PARTS_OF_SMALL_STATE:
            await asyncio.sleep(0)
    return state_machine
