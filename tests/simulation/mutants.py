"""Mutation tests of the checkers. Each mutant has one defect; the simulation of some seed must reveal it.

    python tests/simulation/mutants.py [NAME...]

If a mutant survives all seeds, the checkers do not detect its defect. Some defects are no mutants because they violate no
guarantee: a batch that is executed twice, which writes the same values again; a follower that takes over from a live leader,
which loses nothing and steps down; a replica that is taken for a primary, which rejects every write. Others have unit tests
instead, because another check nearly always detects the situation earlier: a lease that expires during a read without a
commit; a node that uses the reply of the sentinel with the oldest view; a node that still sends commands to the old primary;
a leader that does not compare its epoch with the stored one (the position tells the same, unless two nodes have chosen the
same epoch, or another leader has lost its log); a restarted node that takes over at a primary at which it has seen no
leader (2,800 worlds did not reveal it); an unacknowledged batch that counts as a fork, or as later than the state of a
former leader; a former leader that does not know what it acknowledged; a Redis that has loaded for long and does not count as
restarted when it answers (`test_election.py`); a primary that is kept though the sentinels have replaced it
(`test_replicas.py`); a commit that is acknowledged after its lease has expired (`test_commits.py`); an error of a
release without its id (`test_outage.py`): after changes of the timing, 300 worlds did not reveal these any more. Others have tests with a real Redis, because 300 worlds did not reveal them:
a part of a checkpoint that is written late, by a former leader, after a rollback, or after a checkpoint or a part that Redis
has lost; deletions that are skipped after an interrupted checkpoint; commits without WATCH (a simulated primary closes its
connections when it is demoted); a lost reply that counts as a loss of leadership, which loses nothing
(`test_checkpoints.py`, `test_commit_log.py`); a resignation from a Redis that lacks acknowledged batches; a restored snapshot
that no replica has acknowledged (`test_redis_replies.py`). An unknown field has a unit test.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from conformance.mutation import ROOT, Mutant, NotRunError, environment, main, mutated
from simulator.scenario import (
    FIRST_ANY_OF_SEED,
    FIRST_BELIEF_SEED,
    FIRST_CRASH_SEED,
    FIRST_LOCK_KINDS_SEED,
    FIRST_REPLICATED_SEED,
    FIRST_V1_FEATURES_SEED,
)

SEEDS = 300


MUTANTS = [
    # -- notifications
    Mutant(
        "notifies before the commit is acknowledged",
        "server/pipeline.py",
        "            self._commits.send(self._outcome, now, self._on_acknowledged)\n        else:",
        "            self._deliver()\n            self._commits.send(self._outcome, now, self._on_acknowledged)\n        else:",
    ),
    Mutant(
        "a rejection flushes messages that are not stored yet",
        "server/notifier.py",
        "        if in_order:\n",
        "        if True:\n",
        first=17,
    ),
    Mutant(
        "the owner of an expired lock is not notified",
        "server/notifier.py",
        "            self.outcome.send(session.connection, message)\n        if requester",
        "            pass\n        if requester",
    ),
    Mutant(
        "ids are sent that are not reserved",
        "server/commits.py",
        "self._store.commit(Batch(changes, self.ids_reserved_below,",
        "self._store.commit(Batch(changes, 1,",
    ),
    # -- the store
    Mutant(
        "a take-over without a commit counts as a commit",
        "storage/redis/log.py",
        "next((end for end in reversed(self.ends) if end[1]), self.ends[0])",
        "self.position",
        first=FIRST_REPLICATED_SEED + 5639,
    ),
    Mutant(
        "takes over without verifying the primary",
        "storage/redis/follower.py",
        "await self._keyspace.primary.verify()  # last",
        "pass  # last",
        first=FIRST_REPLICATED_SEED + 31197,
    ),
    Mutant(
        "a commit accepts a gap",
        "storage/redis/commit.py",
        "if meta.has_log and meta.position == last_stored:",
        "if meta.has_log and meta.position <= last_stored:",
        first=40,
    ),
    Mutant(
        "ended requests stay in the store",
        "storage/redis/records.py",
        '            if change.state is ENDED:\n                lines[id_] = b"%d" % id_',
        "            if change.state is ENDED:\n                pass",
    ),
    Mutant(
        "a snapshot that is lost again is not restored again",
        "storage/redis/keyspace.py",
        "        await self.collect_garbage()\n        self._attempted_restore = None",
        "        await self.collect_garbage()",
        first=40,
    ),
    Mutant(
        "ids and fencing tokens depend on the store alone",
        "server/namespace.py",
        "unix_us = time.time_ns() // 1000",
        "unix_us = 0",
    ),
    Mutant(
        "the next fencing token is not stored",
        "storage/redis/records.py",
        "batch.next_id, batch.next_fence)",
        "batch.next_id, 1)",
    ),
    Mutant(
        "a leader does not compare the log after a reconnection",
        "storage/redis/commit.py",
        "        outcome = self._compare(meta)",
        "        outcome = self._compare(meta)\n"
        "        outcome = Outcome.NOT_STORED if outcome is Outcome.ROLLED_BACK else outcome",
        first=40,
    ),
    Mutant(
        "a commit that Redis has rejected counts as stored",
        "storage/redis/commit.py",
        "            self._watching = False\n            self.recover(self.resume())",
        "            self._finish(Outcome.STORED)",
    ),
    Mutant(
        "the log is trimmed before the checkpoint",
        "storage/redis/commit.py",
        "encode_position(min(self.checkpoint, retained))",
        "encode_position(max(self.checkpoint, retained))",
    ),
    Mutant(
        "a checkpoint is moved before its records are written",
        "storage/redis/checkpoint.py",
        "is_last_part=following is None,",
        "is_last_part=True,",
    ),
    Mutant(
        "a loaded state lacks the first log entry after the checkpoint",
        "storage/redis/replica.py",
        "        for entry in entries:\n            if isinstance(entry, BatchCommitted):\n                encoded_counters",
        "        for entry in entries[1:]:\n            if isinstance(entry, BatchCommitted):\n                encoded_counters",
    ),
    Mutant(
        "the log is not applied to a loaded state",
        "storage/redis/replica.py",
        "                state.changes |= decode_records(records, decoder)",
        "                pass",
    ),
    Mutant(
        "deletions are never written by a checkpoint",
        "storage/redis/checkpoint.py",
        "[line for line in part if _is_deletion(line)]",
        "[]",
    ),
    Mutant(
        "a checkpoint lacks the log of former leaders",
        "storage/redis/checkpoint.py",
        "self._last_checkpoint, changes = await self._read_changes(new.position)",
        "self._last_checkpoint, _ = await self._read_changes(new.position)",
    ),
    Mutant(
        "a failed checkpoint loses its changes",
        "storage/redis/checkpoint.py",
        "                self._changes = changes | self._changes",
        "                pass",
    ),
    # -- leading
    Mutant(
        "a follower does not apply the log",
        "storage/redis/follower.py",
        "if isinstance(entry, BatchCommitted):",
        "if False:",
    ),
    # -- several Redises
    Mutant(
        "restores a snapshot over a diverged state",
        "storage/redis/keyspace.py",
        "if meta is not None and not history.contains(meta.position):",
        "if False:",
        first=FIRST_REPLICATED_SEED,
    ),
    Mutant(
        "a follower discards what Redis has lost",
        "storage/redis/election.py",
        "if diverged and not lacks_commits:",
        "if diverged:",
        first=FIRST_REPLICATED_SEED + 17,
    ),
    Mutant(
        "the result of WAIT is ignored",
        "storage/redis/commit.py",
        "(missing := self._ack_policy.missing_acks(replies[-1]))",
        '(missing := "")',
        first=FIRST_REPLICATED_SEED,
    ),
    Mutant(
        "a follower takes over without querying the sentinels",
        "storage/redis/primary.py",
        "if self._connection is not None and await self.find_replacement(self._connection) is not None:",
        "if False:",
        first=FIRST_REPLICATED_SEED + 90143,
    ),
    # -- crashes of a single Redis
    Mutant(
        "a former leader loads the state of Redis before it publishes its position",
        "storage/redis/election.py",
        "if replica.has_led_last and replica.missing_from(meta.history) is not None:",
        "if False:",
        first=FIRST_CRASH_SEED + 26,
    ),
    Mutant(
        "a candidate trusts the state of a Redis that has restarted",
        "storage/redis/election.py",
        "if meta is not None and run.id != meta.run_id:",
        "if False:",
        first=FIRST_CRASH_SEED + 5,
    ),
    Mutant(
        "a follower drops its replica before it has loaded the state again",
        "storage/redis/follower.py",
        "if state is None and old is not None and not self._has_acquired:",
        "if False:",
        first=FIRST_CRASH_SEED + 197,
    ),
    # -- beliefs
    Mutant(
        "the client counts the session timeout from when it notices that the connection is lost",
        "client/keepalive.py",
        '''        self.ends_at = max(self.ends_at, sent_at + self.timeout_s)

    def stop(self) -> None:
        """Stop the timer of the pings."""
''',
        """        self.ends_at = math.inf

    def stop(self) -> None:
        import time

        self.ends_at = time.monotonic() + self.timeout_s
""",
        first=FIRST_BELIEF_SEED,
    ),
    Mutant(
        "the client counts the timeout of a lock from the arrival of the grant",
        "client/requests.py",
        "since = max(self._handshake.connected_at, request.first_sent_at or 0.0)",
        "since = now",
        first=FIRST_BELIEF_SEED,
    ),
    Mutant(
        "an extension that shortens a lock counts from its answer",
        "client/requests.py",
        "self.live.limit_hold(extend.request, extend)",
        "pass",
        first=FIRST_BELIEF_SEED,
    ),
    Mutant(
        "a client that closes keeps its bound locks until the answer to bye",
        "client/session.py",
        "        self.watches.close_all()\n        self.requests.lose_bound()\n",
        "        self.watches.close_all()\n",
        first=FIRST_BELIEF_SEED,
    ),
    Mutant(
        "the block of a lost lock goes on",
        "client/aio_connection.py",
        "            request.on_lost()\n",
        "            pass\n",
        first=FIRST_BELIEF_SEED,
    ),
    # -- sessions
    Mutant(
        "a session ends with its connection",
        "server/dispatcher.py",
        "        if session.key is not None:\n            if session.connection is connection:",
        "        if session.key is not None and not session.bound:\n            if session.connection is connection:",
    ),
    Mutant(
        "a resumed session gets no retained replies", "server/dispatcher.py", "for reply in missed:", "for reply in ():"
    ),
    Mutant(
        "a resumed session gets no live requests", "server/dispatcher.py", "for request in live:", "for request in ():"
    ),
    Mutant(
        "only the first slice of the state of a resumed session is sent",
        "server/dispatcher.py",
        "        if report:  # slices are left\n            return False\n",
        "",
    ),
    Mutant(
        "a connection that resumes a session is closed, as if another connection had taken the session over",
        "server/dispatcher.py",
        "        session.state_report, session.connected_at = None, now\n",
        "        session.state_report, session.connected_at = None, now\n        self._detach_replaced(connection)\n",
    ),
    Mutant(
        "waiting requests of a session are not stored",
        "server/notifier.py",
        "if session.key is not None and request.state is not ENDED:",
        "if False:",
    ),
    Mutant(
        "sessions end with the server",
        "server/dispatcher.py",
        "            sessions.restore(part, ())\n",
        "            sessions.restore((), ())\n",
    ),
    Mutant(
        "every held lock ends with its session",
        "server/sessions.py",
        "                kept.append(request)\n        self._kept_count",
        "                released.append(request)\n        self._kept_count",
    ),
    # -- version 1 of the wire
    Mutant(
        "the ref of a client's own release is not stored",
        "server/dispatcher.py",
        'change = request if request.ref is None else notifier.retain_reply(session, request, SUCCESS, b"", now)',
        "change = request",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "the refs of ended requests are not stored",
        "storage/redis/records.py",
        "            ref=reply.ref,",
        "            ref=None,",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "the refs of live requests are not stored",
        "storage/redis/records.py",
        "            request.ref,",
        "            None,",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "the reason of an end is not read from the store",
        "storage/redis/records.py",
        "_decode_ended(line).payload.reason if line else SUCCESS",
        "SUCCESS",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "notes are not stored",
        "storage/redis/records.py",
        "            note,\n            context.traceparent,",
        "            None,\n            context.traceparent,",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "the reply to a release carries the ref of the request",
        "server/dispatcher.py",
        "outbox.append(success(request.id, command.ref))",
        "outbox.append(success(request.id, request.ref))",
    ),
    Mutant(
        "the reply to a release of another connection's request carries the ref of the request",
        "server/notifier.py",
        "self.outcome.send(requester, replies.released(event, now, ref, requester.principal))",
        "self.outcome.send(requester, replies.released(event, now, request.ref, requester.principal))",
    ),
    Mutant(
        "a rejected release does not echo its ref",
        "server/notifier.py",
        "Code.UNKNOWN_ID, reason, ref=ref, id=event.id",
        "Code.UNKNOWN_ID, reason, id=event.id",
        first=21,
    ),
    Mutant(
        "queued is sent to a quiet connection",
        "server/notifier.py",
        "        if request.ref is None or not session.quiet:\n            self.outcome.send(session.connection, replies.queued",
        "        if True:\n            self.outcome.send(session.connection, replies.queued",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "queued is sent to a quiet connection that resumes",
        "server/dispatcher.py",
        "elif request.ref is None or not session.quiet:",
        "else:",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "a repeated ref of an ended request gets no reply",
        "server/dispatcher.py",
        "            send(connection, earlier.message or replies.ended(earlier.id, earlier.reason, earlier.ref))",
        "            pass",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "bye leaves the waiting requests",
        "server/dispatcher.py",
        "        if not self._end_session(session, now, principal_name(connection)):\n            return False\n        self.outcome",
        "        self.outcome",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "bye does not end the session",
        "server/dispatcher.py",
        "        if not self._end_session(session, now, principal_name(connection)):\n            return False\n        self.outcome",
        "        if not self._end_requests(session, now):\n            return False\n        self.outcome",
        first=FIRST_V1_FEATURES_SEED,
    ),
    Mutant(
        "a connection stays open after bye",
        "server/dispatcher.py",
        "        connection.detach()\n        self.outcome.closing.append(connection)",
        "        connection.detach()",
        first=FIRST_V1_FEATURES_SEED,
    ),
    # -- the lock manager
    Mutant(
        "a lock times out a little early",
        "core/manager.py",
        "        request.deadline = ceil(now + request.transaction_timeout_ms)\n        self.deadlines.add(request.deadline, request.id)",
        "        request.deadline = ceil(now + request.transaction_timeout_ms - 5)\n        self.deadlines.add(request.deadline, request.id)",
    ),
    Mutant(
        "a queue times out a little early",
        "core/manager.py",
        "request.deadline = ceil(now + timeout_ms)",
        "request.deadline = ceil(now + timeout_ms - 5)",
    ),
    Mutant(
        "a restart advances the clock",
        "server/namespace.py",
        "state.clock_ms - time.monotonic() * 1000",
        "state.clock_ms - time.monotonic() * 1000 + 1000",
    ),
    Mutant(
        "shared locks ignore an exclusive one",
        "core/grant.py",
        "    return resource.exclusive_count > 0 and not own_grants",
        "    return False",
    ),
    Mutant(
        "requests overtake waiters",
        "core/grant.py",
        "    if resource.wait_queue is not None:\n        return False",
        "",
    ),
    Mutant(
        "shared requests overtake exclusive ones",
        "core/grant.py",
        "if queue.exclusive.has_other_before(request.entry(name), owner):",
        "if False:",
    ),
    Mutant(
        "the order of a rearranged queue is not stored",
        "storage/redis/records.py",
        "(stored.moved or {}).items()",
        "{}.items()",
    ),
    Mutant("deadlocks are not detected", "core/manager.py", "deadlock.may_create_cycle(table, request)", "False"),
    # -- anyOf
    Mutant(
        "anyOf is granted resources that others hold",
        "core/grant.py",
        "    if holder is not None:\n        return holder.owner == owner\n    resource = table.resources.get(name)",
        "    if holder is not None:\n        return True\n    resource = table.resources.get(name)",
        first=FIRST_ANY_OF_SEED,
    ),
    Mutant(
        "anyOf is granted resources that others wait for",
        "core/grant.py",
        "            return False\n        if units is not None and not units_fit(",
        "            pass\n        if units is not None and not units_fit(",
        first=FIRST_ANY_OF_SEED,
    ),
    Mutant(
        "anyOf is granted less than its target",
        "core/manager.py",
        "if reached >= take.target:",
        "if reached > 0:",
        first=FIRST_ANY_OF_SEED,
    ),
    Mutant(
        "the granted resources of anyOf are not read from the store",
        "storage/redis/records.py",
        "stored.traceparent, stored.chosen),",
        "stored.traceparent, None),",
        first=FIRST_ANY_OF_SEED,
    ),
    # -- units and subtrees
    Mutant(
        "a lock below a subtree is granted on the fast path",
        "core/manager.py",
        "        elif table.subtrees and any(map(table.is_below_subtree, request.exclusive)):",
        "        elif not request.exclusive:",
        first=FIRST_LOCK_KINDS_SEED + 15,
    ),
    Mutant(
        "a lock below a subtree is released on the fast path",
        "core/manager.py",
        " and not any(map(table.is_below_subtree, names))",
        "",
        first=FIRST_LOCK_KINDS_SEED + 26,
    ),
    Mutant(
        "units that are released on the fast path stay in use",
        "core/lock_table.py",
        "            resource.special.remove(None, units)",
        "            pass",
        first=FIRST_LOCK_KINDS_SEED + 14,
    ),
    Mutant(
        "units are granted on the fast path beyond their limit",
        "core/manager.py",
        "        elif resource.wait_queue is not None or units > limit - units_in_use(resource, limit):",
        "        elif resource.wait_queue is not None:",
        first=FIRST_LOCK_KINDS_SEED + 4,
    ),
    Mutant(
        "waiters for units are granted beyond their limit",
        "core/manager.py",
        "            if units > limit - units_in_use(resource, limit):\n                return reads",
        "            if units > limit:\n                return reads",
        first=FIRST_LOCK_KINDS_SEED,
    ),
    Mutant(
        "subtrees ignore the locks below them",
        "core/grant.py",
        "    return held or (isinstance(special, Subtree) and has_conflicting_below(table, name, special, mode, owner))",
        "    return held",
        first=FIRST_LOCK_KINDS_SEED,
    ),
    Mutant(
        "the units in use are not counted",
        "core/grant.py",
        "        in_use = special.in_use\n",
        "        pass\n",
        first=FIRST_LOCK_KINDS_SEED,
    ),
    Mutant(
        "requests for units overtake earlier ones",
        "core/grant.py",
        "request.units[name], queue, entry)",
        "request.units[name])",
        first=FIRST_LOCK_KINDS_SEED + 78,
    ),
    Mutant(
        "a release grants no waiter",
        "core/manager.py",
        "            self._end(Released(request, SUCCESS), events)\n            if affected:",
        "            self._end(Released(request, SUCCESS), events)\n            if False:",
    ),
]


def detect(mutant: Mutant) -> str:
    """Run seeds until one reveals the mutant; return the seed and the violation, or "" if the mutant survives.

    A seed with violations reveals the mutant only if the original code has none with it.
    """
    with mutated(mutant, "genie", "simulator") as folder:
        first, end = mutant.first, mutant.first + SEEDS
        while first < end:
            process = simulate(folder, first, end - first)
            if process.returncode == 0:
                return ""
            seed = re.search(r"--seed (\d+)", process.stdout)
            violation = re.search(r"^\*\*\* (.*)", process.stdout, re.MULTILINE)
            if seed is None:
                raise NotRunError(f"CRASHES: {process.stderr.strip().splitlines()[-1]}")
            if simulate(ROOT, int(seed[1]), 1).returncode == 0:
                return f"seed {seed[1]}: {violation[1][:110] if violation else ''}"
            first = int(seed[1]) + 1
    return ""


def simulate(folder: Path, first: int, seeds: int) -> subprocess.CompletedProcess[str]:
    """Simulate consecutive seeds with the code in a folder, until the first with violations."""
    return subprocess.run(
        [*(sys.executable, "-m", "simulator.soak", "--stop", "--tail=0"), *(f"--first={first}", f"--seeds={seeds}")],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main(MUTANTS, detect, __doc__))
