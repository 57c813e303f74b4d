"""Executes the commands of connections against the lock manager, and begins and ends their sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, TypeVar

import structlog

from genie import build, core, work_time
from genie.access import INSPECT, LOCK, Principal
from genie.config import NAMESPACE
from genie.core import (
    SUCCESS,
    Disconnect,
    Expire,
    Granted,
    LockManager,
    Release,
    Released,
    Request,
    State,
    in_parts,
    needs_session,
)
from genie.core.size import SHORT_TEXT_BYTES, charged_names, excess_bytes, text_bytes, text_excess
from genie.errors import Code, RequestRejected
from genie.history.records import command_line
from genie.observability.histogram import BOUNDS_MS
from genie.protocol import replies
from genie.protocol.commands import (
    Bye,
    Hello,
    Inspect,
    LargeRequest,
    Namespaced,
    Ping,
    ReleaseByRef,
    Unwatch,
    Watch,
    WireCommand,
    read,
)
from genie.protocol.diagnostics import has_too_many_values, too_many_values
from genie.protocol.framing import LongLine
from genie.protocol.replies import granted, success
from genie.server.auth import authorize
from genie.server.notifier import Notifier
from genie.server.outcome import BatchOutcome
from genie.server.peer import DETACHED, END_OF_INPUT, SESSION_STATE, Item, Peer, principal_name
from genie.server.rejections import wrong_namespace
from genie.server.request_limits import RequestLimits
from genie.server.sessions import (
    Outbound,
    Session,
    SessionEnd,
    SessionTable,
    fingerprint,
    is_same_request,
)
from genie.server.state_size import StateSize
from genie.server.takeovers import TAKEN_OVER, Takeovers
from genie.server.turns import IterationTurns
from genie.server.watch_events import WatchEvents
from genie.server.watches import WatchRegistry
from genie.storage.store import Batch, RetainedReply, snapshot_of

if TYPE_CHECKING:
    from genie.config import Limits
    from genie.history.recorder import Recorder
    from genie.observability.stats import Stats

log = structlog.get_logger()

T = TypeVar("T")

MAX_ENDED_LOCKS = 1_000
"""Maximum number of locks, held or waited for, that end in one slice because a connection or a session has ended. The last
request of a slice may exceed the limit."""

MAX_ENDED_REPLIES = 1_000
"""Maximum number of retained replies that are dropped in one slice because a session has ended: about 2 ms with their deletion
from the store."""

MAX_REPORTED_REQUESTS = 1_000
"""Maximum number of requests whose state, or retained reply, is sent in one slice after a client has resumed a session. The
resources that a reply lists count, too. The last request of a slice may exceed the limit."""

MAX_RECOVERED = 2_000
"""Maximum number of sessions, retained replies or resources in one part of a recovery."""

MAX_EXPIRED_SESSIONS = 1_000
"""Limit for the sessions that expire in one batch: the number of sessions, of their locks and of their retained replies
in total. The last session may exceed the limit."""

MAX_EXPIRED_LOCKS = 250
"""Limit for the requests that expire in one batch: the number of their locks, held or waited for, and of the locks that
are granted in their place. A waiting request that times out costs more than another end, because its event describes
its blockers."""

EXPENSIVE_S = 0.0005
"""A command that takes longer than this many seconds is expensive, for example because it has searched for a deadlock.
The next commands of the connection wait for a later batch."""

MANY_NAMES = 1_000
"""The release of a request with more names is an expensive command. A request that compares its subtrees with more
locked names is a slow command."""

MANY_NAMES_S = 0.003
"""Assumed duration in seconds of the release of more than `MANY_NAMES` uncontended names, which is not measured."""

FIRST_BOUND_MS = BOUNDS_MS[0]
"""Upper bound of a histogram's first bucket, into which nearly all hold times fall."""

SLOW_COMMANDS = frozenset((Inspect, Watch))
"""Commands whose work and answer grow with the state. A batch executes at most one slow command or long line."""

WATCH_COMMANDS = frozenset((Watch, Unwatch))
"""Commands that change the prefixes that a connection watches. They wait for its watch events of earlier changes."""

_SERVER = build.description()
_EXPIRE = Expire(MAX_EXPIRED_LOCKS)


class Dispatcher:
    """Executes the commands of all connections of one namespace, and ends expired requests and sessions.

    `outcome` collects the messages and changes of a batch. `now` is always the lock manager's time of the batch (ms).
    """

    def __init__(
        self,
        manager: LockManager,
        limits: Limits,
        stats: Stats,
        outcome: BatchOutcome,
        recorder: Recorder | None = None,
        turns: IterationTurns | None = None,
        *,
        namespace: str = NAMESPACE,
    ) -> None:
        # More than 16 fields, because `execute` reads those of other objects often: a field of a field takes two look-ups.
        self.manager = manager
        self.stats = stats
        self.sessions = SessionTable(limits.principal_share)
        self._takeovers = Takeovers(namespace)
        self.size = StateSize(manager, self.sessions, limits)
        self.watches = WatchRegistry(manager.table, self.size, max_unread_bytes=limits.max_unread // 4)
        self.outcome = outcome
        """The changes and messages of the current batch."""
        self.watch_events = WatchEvents(self.watches, outcome, manager.deadlines, stats, namespace)
        self.notifier = Notifier(manager, self.sessions, self.size, self.watch_events, stats, outcome, recorder)
        self.limits = RequestLimits(manager, self.size, limits)
        self._namespace = namespace
        self._turns = turns or IterationTurns()
        self._charges, self._short_charges = self.size.requests, self.size.short_requests
        """The charges of large requests, and those of other requests of named principals, by id."""
        self._ended_count = 0
        """Number of sessions, of their locks and of their retained replies that have ended in this batch."""
        self._unrestored: list[RetainedReply] = []
        """The loaded replies, while the recovery has not restored all of them in their sessions."""
        self._watched = self.watch_events.watched
        """The watched prefixes. While it is empty, no watch events are sent."""
        self._table, self._step = manager.table, manager.step

    # -- expiry, recovery and disposal --------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Continue pending grants, end expired requests and sessions, and send waiting watch events.

        Each of the four does at most one slice of its work, and only if `turns` gives it a share of this iteration.
        """
        manager, events, turns, caller = self.manager, self.watch_events, self._turns, id(self)
        if manager.pending_grants:
            turns.run_slice((caller, "grants"), self._continue_grants, now)
        if manager.deadlines.next <= now:
            turns.run_slice((caller, "requests"), self._expire_requests, now)
        if self.sessions.deadlines.next <= now:
            turns.run_slice((caller, "sessions"), self._expire_sessions, now)
        if events.waiting:
            turns.run_slice((caller, "watch events"), events.send_waiting)
        if manager.pending_grants or events.waiting:
            # Work is left, so the next batch is due at once. Reading `deadlines.next` may have replaced an earlier 0.
            manager.deadlines.soonest = 0.0

    def _continue_grants(self, now: float) -> None:
        self.notifier.handle_events(self._step(core.Continue(), now), now)

    def _expire_requests(self, now: float) -> None:
        self.notifier.handle_events(self._step(_EXPIRE, now), now)

    def _expire_sessions(self, now: float) -> None:
        """End expired sessions, up to `MAX_EXPIRED_SESSIONS` sessions, locks and retained replies in total."""
        self._ended_count = 0
        for session in self.sessions.expired(now, MAX_EXPIRED_SESSIONS):
            self._ended_count += 1
            if not self._end_session(session, now) or self._ended_count >= MAX_EXPIRED_SESSIONS:
                break  # the rest of this session, and the other sessions, end in the next batch

    def recover(self, replies: Iterable[RetainedReply], clock: Callable[[], float]) -> Iterator[None]:
        """Restore sessions, retained replies and outcomes from the loaded state, then grant every grantable request.

        Each step of the returned iterator does a part, of a few ms. The caller stores the changes of each part.
        """
        self._unrestored = list(replies)  # from now on: a snapshot may be needed before the first part
        return self._recover_in_parts(self._unrestored, clock)

    def _recover_in_parts(self, replies: list[RetainedReply], clock: Callable[[], float]) -> Iterator[None]:
        """Do the work of `recover`. Yield after each part."""
        table, sessions, handle_events = self._table, self.sessions, self.notifier.handle_events
        for replies_part in _slices(replies):
            for reply in replies_part:
                self.manager.add_outcome(reply.id, reply.reason)
            yield
        disconnected: list[Request] = []
        for part in in_parts(chain(table.held.values(), table.waiting.values())):
            sessions.restore(part, ())
            self.size.load(part)
            disconnected += filter(needs_session, part)
            yield
        for replies_part in _slices(sorted(replies, key=lambda reply: reply.at)):
            sessions.restore((), replies_part)
            yield
        self._unrestored = []
        for detached in _slices([*sessions]):
            now = clock()  # the timeout of a session begins when it can soon be resumed
            for session in detached:
                sessions.detach(session, now)
            yield
        for part in in_parts(disconnected):
            now = clock()
            handle_events(self._step(Disconnect(part), now), now)
            yield
        for names in _slices([*table.resources]):  # a grant removes names from the table if it leaves no waiters
            resources = {name: table.resources[name] for name in names if name in table.resources}
            contended = [name for name, resource in resources.items() if resource.wait_queue is not None]
            now = clock()
            handle_events(self._step(core.Recover(contended), now), now)
            yield

    def snapshot(self, next_id: int, now: float) -> Batch:
        """Return a snapshot of all requests and retained replies, which the store can write to Redis.

        `next_id` is greater than all assigned ids: a later leader assigns ids from `next_id` on.
        """
        in_sessions = chain.from_iterable([session.retained_replies or () for session in self.sessions])
        retained = {reply.id: reply for reply in chain(self._unrestored, in_sessions)}  # some have no session yet
        return snapshot_of(self.manager, retained, next_id, now)

    def dispose_in_parts(self) -> Iterator[None]:
        """Drop the state, in parts of a few ms: yield between the parts.

        All reference cycles are broken, so that the state is freed without the garbage collector.
        """
        self.watch_events.clear()
        self.outcome.clear()
        yield from self.watches.dispose_in_parts()
        yield from self.size.dispose_in_parts()
        yield from self.sessions.dispose_in_parts()
        yield from self.manager.free_in_parts()

    # -- execution ----------------------------------------------------------------------------------------

    def execute(  # noqa: C901, PLR0911, PLR0912, PLR0915 - the hot path
        self, now: float, connection: Peer, items: Iterator[Item], may_be_slow: bool = False, excess: int = 0
    ) -> Item | None:
        """Execute commands of a connection in order. Return the item that is not finished, or None if all are executed.

        The execution stops before a slow command unless `may_be_slow`, and after an expensive command. If a session
        with many requests ends or is resumed, it stops after the first slice. `excess` is the `excess_bytes` of a large
        request.
        """
        # This loop executes every command. A `request` that is granted at once and a `release` that grants nothing, the
        # usual cases, are handled inline, which is faster (measured with `genie bench`). Their effects must equal those of
        # `Notifier.on_taken` and `on_released`, which `test_fast_path.py` checks. Every other case has a method.
        if connection.state is DETACHED:
            self._drain_detached(now, connection, items)
            return None
        notifier, outcome, manager, session = self.notifier, self.outcome, self.manager, connection.session
        outbox, principal, recorder = connection.outbox, connection.principal, notifier.recorder
        history = None if recorder is None else recorder.begin_turn(now, principal, session.note)
        if not connection.has_reply:
            connection.has_reply = True
            if not outbox:
                outcome.dirty.append(connection)
        for item in items:
            if type(item) is bytes:
                try:
                    command = read(item)
                except RequestRejected as rejection:
                    if item and not item.isspace():
                        notifier.reject(connection, rejection)
                    continue
            elif type(item) is Namespaced:
                command = item.command
                if history is not None and isinstance(command, (Request, Release)):
                    item = command_line(command)  # noqa: PLW2901 - what is recorded
            elif type(item) is Hello:
                # `hello` is always submitted alone, because it changes the session.
                if item.session is not None and self.sessions.is_ending(item.session, principal_name(connection)):
                    return item
                return None if self._handle_hello(now, connection, item) else SESSION_STATE
            else:
                if isinstance(item, RequestRejected):
                    notifier.reject(connection, item)
                elif type(item) is LongLine:
                    if not may_be_slow:
                        return item
                    if has_too_many_values(item.line):
                        notifier.reject(connection, too_many_values())
                    elif self.execute(now, connection, iter((item.line,)), may_be_slow=True) is not None:
                        return item
                elif not (self._end_input if item is END_OF_INPUT else self._report_state)(now, connection):
                    return item  # slices are left
                continue
            if principal is not None and (rejected := authorize(principal, command, self._table)) is not None:
                notifier.reject(connection, rejected)
                continue
            if type(command) is Request:
                if command.ref is not None and (earlier := session.find(command.ref)) is not None:
                    self._repeat_reply(now, connection, command, earlier)
                    continue
                limits = self.limits
                if (
                    principal is not None  # it must be charged
                    or session.live_requests >= limits.unchecked_requests
                    or manager.next_id >= limits.unchecked_below_id
                ) and not self._admit_request(
                    connection,
                    command,
                    len(command.exclusive) + len(command.shared) if command.details is None else charged_names(command),
                    excess,
                ):
                    continue
                command.origin = session
                if not manager.grant_if_uncontended(command, now):
                    begun, size = work_time.now(), self.size
                    limit = size.max_queue_entries if principal is None else size.queue_limit(principal.name)
                    events = manager.request(command, now, limit)
                    if type(events[0]) is not Granted:
                        notifier.handle_events(events, now, connection, command.ref, item)
                        if work_time.now() - begun > EXPENSIVE_S:
                            return self._after_expensive(begun, items)
                        continue
                if history is not None:
                    history.append(item)
                self.stats.granted += 1
                session.live_requests += 1
                if session.key is not None or command.ref is not None or command.release_on_disconnect:
                    session.add_granted(command)
                if outcome.durable:
                    outcome.changes[command.id] = command
                outbox.append(granted(command, session.quiet))
                if self._watched:
                    self.watch_events.publish(command, "locked")
            elif type(command) is Release:
                request, events = manager.release_if_uncontended(command.id, session), None
                if request is None:
                    begun = work_time.now()
                    events = manager.release(command.id, now)
                    event = events[0]
                    if type(event) is not Released or event.request.origin is not session:
                        if principal is not None and type(event) is Released:
                            _log_forced_release(event.request, principal)
                        notifier.handle_events(events, now, connection, command.ref)
                        if work_time.now() - begun > EXPENSIVE_S:
                            return self._after_expensive(begun, items)
                        continue
                    request = event.request
                if history is not None:
                    history.append(item)
                if request.fence:  # the request was held; 0: it was waiting
                    holds, lasted_ms = self.stats.holds, now - request.since
                    if lasted_ms <= FIRST_BOUND_MS:
                        holds.counts[0] += 1
                        holds.total += lasted_ms
                    else:
                        holds.add(lasted_ms)
                else:
                    self.stats.record_ended(Released(request, SUCCESS), now)
                    notifier.end_wait(request)
                session.live_requests -= 1
                if session.bound:
                    session.unbind(request)
                change = request if request.ref is None else notifier.retain_reply(session, request, SUCCESS, b"", now)
                if self._short_charges or self._charges:
                    self.size.credit_request(request.id, request.context.principal)
                    if events is None and self._charges and len(request.exclusive) > MANY_NAMES:
                        events, begun = [], -inf
                if outcome.durable and (request.fence or session.key is not None):
                    outcome.changes[request.id] = change
                outbox.append(success(request.id, command.ref))
                if self._watched and request.fence:
                    self.watch_events.publish(request, "unlocked")
                if events is not None:
                    if len(events) > 1:  # the release granted waiting requests
                        notifier.handle_events(events[1:], now, connection)
                    if work_time.now() - begun > EXPENSIVE_S:
                        return self._after_expensive(begun, items)
            elif type(command) is Bye:
                is_finished = self._handle_bye(now, connection, command)
                if is_finished:
                    self._drain_detached(now, connection, items)
                return None if is_finished else item
            else:
                begun = work_time.now()
                if self._execute_other(now, connection, command, may_be_slow):
                    return item
                if work_time.now() - begun > EXPENSIVE_S:
                    return self._after_expensive(begun, items)
        return None

    def _after_expensive(self, begun: float, items: Iterator[Item]) -> Item | None:
        """Add the duration of an expensive command to the iteration. Return the next item, which must wait, or None.

        The command began at `begun`, -inf if this was not measured.
        """
        # Here, not at the end of the batch: a command that is executed immediately is not part of a batch.
        self._turns.spend(MANY_NAMES_S if begun == -inf else work_time.now() - begun)
        return next(items, None)

    def _drain_detached(self, now: float, connection: Peer, items: Iterator[Item]) -> None:
        """Ignore the commands of a detached connection, but handle the end of its input."""
        for item in items:
            if item is END_OF_INPUT:
                self._end_input(now, connection)

    def _execute_other(self, now: float, connection: Peer, command: WireCommand, may_be_slow: bool) -> bool:  # noqa: C901, PLR0912 - one branch for each command
        """Execute a command other than `request`, `release` by `id` and `bye`.

        Return True, without executing the command, if it is slow but not `may_be_slow`.
        """
        notifier = self.notifier
        if type(command) is core.Take:
            wanted = command.request
            if wanted.ref is not None and (earlier := connection.session.find(wanted.ref)) is not None:
                self._repeat_reply(now, connection, wanted, earlier)
            else:
                self._take(now, connection, command)
        elif type(command) is LargeRequest:
            self.limits.unchecked_below_id = 0  # so that the request is charged for its texts
            if not may_be_slow and self._is_scan(command.request):
                return True
            item = Namespaced(self._namespace, command.request)
            self.execute(now, connection, iter((item,)), excess=excess_bytes(command.request))
        elif type(command) is ReleaseByRef:
            self._release_by_ref(now, connection, command)
        elif type(command) is core.Extend:
            # A command of 60 bytes stores the whole request again, which may have 10,000 names.
            if not may_be_slow and self.outcome.durable and self.size.is_large(command.id):
                return True
            notifier.handle_events(self._step(command, now), now, connection, command.ref)
        elif type(command) is Ping:
            self.outcome.send(connection, replies.bare("pong", command.ref))
        elif type(command) in SLOW_COMMANDS and not may_be_slow:
            return True
        elif type(command) in SLOW_COMMANDS and connection.closed:
            pass  # no client reads the answer
        elif type(command) in WATCH_COMMANDS and self.watch_events.are_waiting_for(connection):
            return True  # the waiting events, for the watches that existed when they occurred, are sent first
        elif type(command) is Inspect:
            self._inspect(now, connection, command)
        elif type(command) is Watch:
            self._watch(connection, command)
        elif type(command) is Unwatch:
            self.watches.remove(connection, command.prefix)
            self.outcome.send(connection, replies.unwatched(command.prefix, command.ref))
        elif type(command) is Hello:
            reason = "hello: must be the first command of a connection, and sent once"
            notifier.reject(connection, RequestRejected(Code.BAD_REQUEST, reason, ref=command.ref))
        elif type(command) is Namespaced:
            if command.namespace == self._namespace:
                return self.execute(now, connection, iter((command,)), may_be_slow) is not None
            notifier.reject(connection, wrong_namespace(command, self._namespace))
        return False

    def _is_scan(self, request: Request) -> bool:
        """Return whether a request compares its subtrees with more than `MANY_NAMES` names.

        A subtree that is not in the table yet is compared with all locked names. Each subtree is compared with the
        locks of the transaction.
        """
        table = self._table
        if request.details is None or not request.details.subtrees:
            return False
        locked_names = len(table.uncontended) + len(table.resources)
        compares_all_names = any(map(table.is_new, request.details.subtrees))
        return (compares_all_names and locked_names > MANY_NAMES) or table.uncounted_names(request) > MANY_NAMES

    def _take(self, now: float, connection: Peer, command: core.Take) -> None:
        """Execute a request with `anyOf`. Admit it for all its choices, then charge it for the granted resources only.

        An *excess* is the number of bytes by which texts are longer than the short texts that each request may have.
        """
        request = command.request
        excess_by_name = {name: excess for name, _ in command.choices if (excess := text_excess(name))}  # of long names
        excess_without_names = excess_bytes(request)  # the request has no names before it is granted
        max_excess = excess_without_names + sum(excess_by_name.values())
        if self._admit_request(connection, request, len(command.choices), max_excess):
            request.origin = connection.session
            events = self._step(command, now)
            self.notifier.handle_events(events, now, connection, request.ref)
            if type(events[0]) is core.Taken:
                excess_of_names = sum(excess_by_name.get(name, 0) for name in request.names()) if excess_by_name else 0
                self.size.charge_again(request, excess_without_names + excess_of_names)

    def _admit_request(self, connection: Peer, request: Request, lock_count: int, excess: int) -> bool:
        """Charge a request for `lock_count` locks and the `excess` bytes of its long texts.

        If the request exceeds a limit, send an error and return False.
        """
        exceeded_limit = self.limits.charge(connection.session, request, lock_count, excess)
        if exceeded_limit:
            self.notifier.reject(connection, RequestRejected(Code.TOO_MANY, exceeded_limit, ref=request.ref))
        return not exceeded_limit

    def _repeat_reply(self, now: float, connection: Peer, request: Request, earlier: Request | RetainedReply) -> None:
        """Reply to a retry: send the id and the current state of `earlier`, the request with the same `ref`.

        `earlier` is a retained reply if that request has ended. The retry is rejected if its parameters differ from those
        of the earlier request.
        """
        send, session = self.outcome.send, connection.session
        if not _may_be_retry(request, earlier):
            reason = f"this ref belongs to another request, {earlier.id}"
            self.notifier.reject(connection, RequestRejected(Code.REF_CONFLICT, reason, ref=request.ref))
            return
        if not session.quiet:
            send(connection, replies.queued(earlier))
        if isinstance(earlier, RetainedReply):
            send(connection, earlier.message or replies.ended(earlier.id, earlier.reason, earlier.ref))
        elif earlier.state is State.HELD:
            send(connection, replies.locked_again(earlier, now))

    def _release_by_ref(self, now: float, connection: Peer, command: ReleaseByRef) -> None:
        """Release the request that has this `ref` in the session of the connection.

        If the request has ended, send its reason again. If the `ref` is unknown, send an error.
        """
        notifier = self.notifier
        found = connection.session.find(command.ref)
        if found is None:
            reason = f"there is no request with the ref {command.ref!r} in this session, or it ended long ago"
            notifier.reject(connection, RequestRejected(Code.UNKNOWN_ID, reason, ref=command.ref))
        elif isinstance(found, RetainedReply):
            self.outcome.send(connection, replies.ended(found.id, found.reason, command.ref))
        else:
            events = self._step(Release(found.id, command.ref), now)
            notifier.handle_events(events, now, connection, command.ref)

    def _inspect(self, now: float, connection: Peer, command: Inspect) -> None:
        """Send the held and waiting requests that match an `inspect`.

        Resources that the principal may not see are only counted.
        """
        inspection = core.inspect(
            self._table,
            resource=command.resource,
            id=command.id,
            transaction=command.transaction,
            limit=command.limit,
            only=command.only,
        )
        self.outcome.send(connection, replies.inspected(inspection, now, connection.principal, command.ref))

    def _watch(self, connection: Peer, command: Watch) -> None:
        """Subscribe a connection to a prefix, and send the held locks on names with this prefix.

        Send an error instead if the connection watches too many prefixes, or if there is no memory for another watch.
        """
        exceeded_limit = self.watches.add(connection, command.prefix)
        if exceeded_limit:
            self.notifier.reject(
                connection, RequestRejected(Code.TOO_MANY, f"watch: {exceeded_limit}", ref=command.ref)
            )
        else:
            self.watch_events.begin(connection)
            self.limits.check_next()  # the watch takes some of the memory
            rows, truncated = self.watches.encode_held_locks(command.prefix)
            self.outcome.send(connection, replies.watching(command.prefix, rows, truncated, command.ref))

    def revoke_watches(self, connection: Peer) -> bool:
        """End all watches of a connection that lacks the permission for one of them. Return whether watches have ended.

        The watches end at once. The connection ends later, after its earlier commands, which wait for a client that
        reads slowly.
        """
        principal, prefixes = connection.principal, self.watches.prefixes_of(connection)
        if principal is None:
            return False
        # One call for all prefixes: a reload checks every connection, and each may watch 100 prefixes.
        may_see_prefixes = principal.sees_all or principal.first_forbidden(prefixes) is None
        if principal.has_permission(INSPECT) and may_see_prefixes:
            return False
        self.watches.remove_all(connection)
        return bool(prefixes)

    # -- sessions -----------------------------------------------------------------------------------------

    def _handle_hello(self, now: float, connection: Peer, hello: Hello) -> bool:
        """Start or resume the session that a `hello` asks for, and send `welcome`.

        The client of a resumed session also receives the replies that it may have missed, and the state of its live
        requests. Return False if slices of this state are left.
        """
        principal, name = connection.principal, principal_name(connection)
        may_lock = principal is None or principal.has_permission(LOCK)
        if hello.session is None or not may_lock:  # a client that may not lock has no requests to resume
            connection.session.quiet, connection.session.note = hello.quiet, hello.note
            self._welcome(connection, hello, resumed=False)
            return True
        if connection.closed:  # do not take the session over: a newer connection may have resumed it
            connection.enter_state(DETACHED)
            return True
        session, resumed = self.sessions.attach(hello.session, hello.session_timeout_ms, name)
        if session.connection is not None:
            self._takeovers.record(session.number, (session.note, hello.note), name, now)
            self._detach_replaced(session.connection)
        session.connect(connection)
        connection.session = session
        session.quiet, session.note = hello.quiet, hello.note
        self._welcome(connection, hello, resumed=resumed)
        return self._report_state(now, connection)

    def _report_state(self, now: float, connection: Peer) -> bool:
        """Send a slice of the state of a resumed session to its client. Return whether it was the last slice."""
        session, send = connection.session, self.outcome.send
        report = session.state_report
        if report is None or connection.closed:
            return True
        missed, live = report.next_slice(MAX_REPORTED_REQUESTS)
        for reply in missed:
            send(connection, reply.message)
        for request in live:
            if request.state is State.HELD:
                send(connection, replies.locked_again(request, now))
            elif request.ref is None or not session.quiet:  # a quiet client gets no `queued` for requests with a `ref`
                send(connection, replies.queued(request))
        if report:  # slices are left
            return False
        session.state_report, session.connected_at = None, now
        return True

    def _welcome(self, connection: Peer, hello: Hello, *, resumed: bool) -> None:
        message = replies.welcome(_SERVER, self._namespace, resumed=resumed, quiet=hello.quiet, ref=hello.ref)
        self.outcome.send(connection, message)

    def _detach_replaced(self, connection: Outbound) -> None:
        """Close a connection whose session is taken over by a newer connection. Its last message states the reason."""
        self.stats.session_takeovers += 1
        self.outcome.send(connection, replies.error(TAKEN_OVER))
        self.watches.remove_all(connection)
        self._detach(connection)

    def _handle_bye(self, now: float, connection: Peer, bye: Bye) -> bool:
        """End the session of a connection, then close the connection. Return False if slices are left."""
        session = connection.session
        self.watches.remove_all(connection)
        if not self._end_session(session, now, principal_name(connection)):
            return False
        self.outcome.send(connection, replies.bare("bye", bye.ref))
        self._detach(connection)
        return True

    def _detach(self, connection: Outbound) -> None:
        """Ignore further commands of a connection, and close the connection after its messages are sent."""
        connection.detach()
        self.outcome.closing.append(connection)

    def _end_input(self, now: float, connection: Peer) -> bool:
        """Handle the end of a connection's input: end or detach its session, then close it.

        Return False if slices are left. A session with a key is detached: the client can resume it on another
        connection, and its requests end only if the session expires. Without a key, the requests that are bound to the
        connection end now.
        """
        session = connection.session
        self.watches.remove_all(connection)
        if session.key is not None:
            if session.connection is connection:  # a newer connection may have taken the session over
                self.sessions.detach(session, now)
        elif session.bound or session.ending:
            if connection.closed:
                session.connection = None
            if not self._end_requests(session, now):
                return False
        if session.key is None and connection.closed:  # after a half-close, the session is kept: replies are still sent
            self.sessions.end_keyless(session, principal_name(connection))
        self.outcome.closing.append(connection)
        return True

    def _end_session(self, session: Session, now: float, principal: str | None = None) -> bool:
        """End a session, its waiting requests, and its held requests with `onDisconnect: release`.

        Other held requests stay held, without a session. Then the retained replies are deleted from the store, the oldest
        first. Return False if slices are left. A session with a key exists until its last slice, and a `hello` with its
        secret waits for the end: a part of the replies would not identify all retries.
        """
        if not self._end_requests(session, now):
            return False
        if session.key is None:
            self.sessions.end_keyless(session, principal)
            return True
        dropped = self.sessions.drop_oldest_replies(session, MAX_ENDED_REPLIES)
        self._ended_count += len(dropped)
        for id_ in dropped:
            self.outcome.delete(id_)
        if session.retained_replies:
            return False
        self.sessions.remove(session)
        return True

    def _end_requests(self, session: Session, now: float) -> bool:
        """End a slice of the requests of a session that ends. Return whether no request is left."""
        ending = session.ending
        if ending is None:
            ending = session.ending = SessionEnd(session.bound.values())
        ended, kept, lock_count = ending.next_slice(MAX_ENDED_LOCKS)
        self._ended_count += lock_count
        for request in kept:
            session.remove(request)
            note = request.context.note  # a request without a note has got a copy of the session's note by `remove`
            if note is not None and text_bytes(note) > SHORT_TEXT_BYTES:
                self.size.charge_again(request, excess_bytes(request))
                self.limits.check_next()
            self.outcome.store(request)
        if session.key is not None and (session.connection is None or session.connection.closed):
            for request in ended:  # no client can ask for their replies, so the session does not retain them
                session.remove(request)
        if ended:
            self.notifier.handle_events(self._step(Disconnect(ended), now), now)
        if ending:  # slices are left
            return False
        if session.bound:  # requests that have arrived since the first slice: the next slice begins with them
            session.ending = None
        return not session.bound


def _slices(items: list[T]) -> Iterator[list[T]]:
    """Yield a list in slices of `MAX_RECOVERED`."""
    for start in range(0, len(items), MAX_RECOVERED):
        yield items[start : start + MAX_RECOVERED]


def _log_forced_release(request: Request, principal: Principal) -> None:
    """Log that an operator has released a request. Do nothing if `principal` has released its own request."""
    if request.context.principal != principal.name:
        log.info(
            "request released by operator",
            id=request.id,
            principal=principal.name,
            request_principal=request.context.principal,
        )


def _may_be_retry(request: Request, earlier: Request | RetainedReply) -> bool:
    """Return whether a request may be a retry of `earlier`, which has the same `ref`."""
    if not isinstance(earlier, RetainedReply):
        return is_same_request(request, earlier)
    if earlier.fingerprint is not None:
        return fingerprint(request) == earlier.fingerprint
    # After a restart or a takeover, the parameters of the ended request are unknown: any request with its `ref` is a retry.
    return earlier.request is None or is_same_request(request, earlier.request)
