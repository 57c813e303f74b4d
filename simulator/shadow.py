"""The shadow of a leader: what the store has of its state, compared with what the leader has in memory.

A later leader, a follower, and a retry with the same `ref` see what is stored. So after each batch, the stored records must say
the same as the leader's memory. The checks are simple and slow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from genie.core import Request
from genie.lock_modes import QueueMode, is_subtree
from genie.server.dispatcher import Dispatcher
from genie.server.pipeline import Pipeline
from genie.server.sessions import Session, SessionTable, is_same_request
from genie.storage.redis.records import RecordDecoder, decode_counters, encode, encode_changes, encode_counters
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch, RetainedReply, StateMachine, is_stored, snapshot_of
from simulator.invariants import Violation

SESSION_FIELDS = ("session_timeout_ms", "session_note")
"""The fields of a record that a later `hello` of the session changes without a change of the record."""

CHECKED_COMMITS = 4
"""A simulation compares a leader with its shadow after each commit whose number is a multiple of this."""


class Shadow:
    """The records that a store has after the batches of one leader.

    `loaded` is the state that the leader has loaded, before it executes a command.
    """

    def __init__(self, loaded: Batch) -> None:
        self.records: dict[int, bytes] = {}
        """The stored record of each live request and retained reply, by id."""
        self._counters = b""
        """The encoded counters of the last batch."""
        self._stored_once: set[int] = set()
        """The ids of all changes so far, also if their records were deleted later."""
        self.append(loaded)

    def append(self, batch: Batch) -> None:
        """Apply a batch, as it is encoded now."""
        self._counters = encode_counters(batch)
        for id_, line in encode_changes(batch.changes).items():
            self._stored_once.add(id_)
            _, _, record = line.partition(b" ")
            if record:
                self.records[id_] = record
            else:
                self.records.pop(id_, None)

    def load(self) -> StateMachine:
        """Return the state that a new leader would load."""
        decoder, batch, state = RecordDecoder(), decode_counters(self._counters), StateMachine()
        batch.changes = {id_: decoder.decode(id_, record) for id_, record in sorted(self.records.items())}
        state.apply(batch)
        return state

    def check(self, dispatcher: Dispatcher) -> None:
        """Raise Violation unless a new leader would continue from the state of this leader, which has just sent a batch.

        Compared are the records of held requests, of waiting requests of sessions with a key, and of retained replies; the
        wait queues with their modes; the sessions with what they retain; and the counters. Not compared are positions that a
        request has in the queue of a subtree that has ended, and the note and the timeout of a session.
        """
        _check_no_record_differs(dispatcher, self.records, self._stored_once)
        loaded = self.load()
        manager = dispatcher.manager
        if loaded.manager.next_fence != manager.next_fence or loaded.manager.next_id < manager.next_id:
            raise Violation(
                f"the counters {self._counters!r} are stored, not {manager.next_id} and {manager.next_fence}"
            )
        _check_same_queues(dispatcher, loaded)
        _check_same_sessions(dispatcher, loaded, self._stored_once)


def _check_no_record_differs(dispatcher: Dispatcher, stored: dict[int, bytes], stored_once: set[int]) -> None:
    """Check that the leader would store the same records again.

    A request that ends on arrival is not stored: its repetition has the same effect as the first execution.
    """
    manager = dispatcher.manager
    changes = dispatcher.snapshot(manager.next_id, 0).changes
    void = {request.id for request in manager.table.unmoved}
    for id_ in sorted(changes.keys() | stored.keys()):
        change = changes.get(id_)
        record = None if change is None else encode(change)
        if record == stored.get(id_) or (isinstance(change, RetainedReply) and id_ not in stored_once):
            continue
        ignored = (*SESSION_FIELDS, "moved") if id_ in void else SESSION_FIELDS
        if _without(record, ignored) != _without(stored.get(id_), ignored):
            raise Violation(f"{id_} is stored as {stored.get(id_)!r}, and the leader has {record!r}")


def _without(record: bytes | None, fields: Iterable[str]) -> dict[str, object] | None:
    if record is None:
        return None
    return {name: value for name, value in json.loads(record).items() if name not in fields}


def queues(state: StateMachine | Dispatcher) -> dict[str, list[tuple[int, QueueMode]]]:
    """Return the stored waiting requests of each resource in queue order, each as its id and its mode."""
    found = {}
    for name, resource in state.manager.table.resources.items():
        waiters = [
            request
            for *_, request in (() if resource.wait_queue is None else resource.wait_queue.entries())
            if is_stored(request)
        ]
        if waiters:
            found[name] = [(request.id, dict(request.queue_modes())[name]) for request in waiters]
    return found


def _check_same_queues(dispatcher: Dispatcher, loaded: StateMachine) -> None:
    """Check that the stored waiting requests have the same order in both states.

    The queue of a subtree is not loaded if only requests name it that are not stored, or that have ended.
    """
    table, loaded_table = dispatcher.manager.table, loaded.manager.table
    theirs = queues(dispatcher)
    void = {request.id for request in table.unmoved}
    ours = queues(loaded)
    for name in sorted(theirs.keys() | ours.keys()):
        if is_subtree(name) and (name not in loaded_table.subtrees or name in table.closing):
            continue
        if ours.get(name) != theirs.get(name) and not (void and is_subtree(name)):
            raise Violation(f"the queue of {name} is stored as {ours.get(name)}, and the leader has {theirs.get(name)}")


def _check_same_sessions(dispatcher: Dispatcher, loaded: StateMachine, stored_once: set[int]) -> None:
    """Check that sessions that are worth resuming have the same requests, replies and refs in both states."""
    table = loaded.manager.table
    sessions = SessionTable(1.0)
    sessions.restore([*table.held.values(), *table.waiting.values()], ())
    sessions.restore((), sorted(loaded.retained_replies.values(), key=lambda reply: reply.at))
    ours = {session.key: session for session in sessions}
    for session in dispatcher.sessions:
        theirs, restored = _described(session, stored_once), ours.pop(session.key, None)
        if restored is None:
            if theirs != ([], [], {}):
                raise Violation(f"the session {session.key} is not stored, and the leader has {theirs}")
        elif _described(restored, None) != theirs or restored.principal != session.principal:
            raise Violation(f"{session.key} is stored as {_described(restored, None)}, and the leader has {theirs}")
        else:
            _check_repeatable(session, restored)
    if ours:
        raise Violation(f"the sessions {[*ours]} are stored, and the leader does not have them")


Description = tuple[list[int], list[tuple[float, int, str | None, bytes, str]], dict[str, int]]


def _described(session: Session, stored_once: set[int] | None) -> Description:
    """Return the ids of a session's live requests, its retained replies, and the id of the request of each ref.

    Replies whose requests are not in `stored_once` are left out.
    """
    replies = [reply for reply in session.retained_replies or () if stored_once is None or reply.id in stored_once]
    retained = [(reply.at, reply.id, reply.ref, reply.message, str(reply.reason)) for reply in replies]
    refs = {
        ref: found.id
        for ref, found in _refs(session)
        if isinstance(found, Request) or stored_once is None or found.id in stored_once
    }
    return sorted(session.bound), sorted(retained), refs


def _refs(session: Session) -> Iterator[tuple[str, Request | RetainedReply]]:
    return ((ref, session._refs[ref]) for ref in sorted(session._refs))


def _check_repeatable(session: Session, restored: Session) -> None:
    """Check that a retry of a live request is recognized after it was loaded."""
    for id_, request in session.bound.items():
        if not is_same_request(request, restored.bound[id_]):
            raise Violation(f"a retry of {request} would be rejected after it is loaded")


# -- The leaders of a simulation ----------------------------------------------------------------------


class Shadows:
    """Compares each leader with its shadow, after every `CHECKED_COMMITS`th commit of all leaders.

    `on_violation` is called with a description.
    """

    def __init__(self, on_violation: Callable[[str], None]) -> None:
        self._on_violation = on_violation
        self._shadows: dict[object, tuple[Shadow, Pipeline]] = {}
        """The shadow and the pipeline of the last leader that uses a store, by the store."""
        self._recovering: set[Pipeline] = set()
        """Pipelines that have not restored all sessions yet, so that they cannot be compared."""
        self._commits = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow all leaders of this process in this context."""
        recover, commit = Pipeline.recover, RedisStore.commit

        async def recover_and_compare(pipeline: Pipeline, replies: Iterable[RetainedReply]) -> None:
            retained, manager = {reply.id: reply for reply in replies}, pipeline.manager
            loaded = snapshot_of(manager, retained, manager.next_id, 0.0)
            self._shadows[pipeline._store] = Shadow(loaded), pipeline
            self._recovering.add(pipeline)
            await recover(pipeline, retained.values())
            self._recovering.discard(pipeline)

        def commit_and_compare(store: RedisStore, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
            shadow, pipeline = self._shadows[store]
            shadow.append(batch)
            self._commits += 1
            if self._commits % CHECKED_COMMITS == 0 and pipeline not in self._recovering:
                try:
                    shadow.check(pipeline._dispatcher)
                except Violation as error:
                    self._on_violation(str(error))
            commit(store, batch, done)

        with (
            patch.multiple(Pipeline, recover=recover_and_compare),
            patch.multiple(RedisStore, commit=commit_and_compare),
        ):
            yield
