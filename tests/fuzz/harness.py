"""A server without sockets and its clients, driven by the steps of a scenario, with checks after each step.

The server is the real one from `Connection` on: framing, decoding, pipeline, lock manager, sessions, watches. The clock is
virtual.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from itertools import pairwise
from typing import Any

from fuzz.client_model import ClientModel
from fuzz.grammar import make_line
from fuzz.sent_commands import NAMESPACE
from fuzz.shared_model import KnownRequest, SharedModel, Violation
from fuzz.store import FuzzStore
from fuzz.transport import Transport
from genie.config import Limits
from genie.core import HELD
from genie.errors import Code, RequestRejected
from genie.lock_modes import UnitCount, lock_text
from genie.observability.stats import Stats
from genie.protocol.commands import Hello
from genie.roles import Starting
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.pipeline import WATCH_FLUSH_INTERVAL_S, Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.store import LeadershipLost, RetainedReply
from simulator.checkers.model import exclude, overlap, units_of
from simulator.invariants import check

ID_PLACEHOLDER = re.compile(rb"@(\d+)@")
PING = make_line("ping") + b"\n"
EXPIRY_S = 60.0
"""Longer than every timeout of a scenario."""
MAX_ROUNDS = 2_000
"""Iterations of the event loop within which the server must become idle."""


class ObservedConnection(Connection):
    """Reports output when the server sends it, even if the connection holds it because the client does not read."""

    transport: Transport

    def _hold(self, data: bytes) -> None:
        self.transport.observe(data)
        super()._hold(data)

    def _write_held_output(self, transport: asyncio.Transport) -> None:
        self.transport.is_observed = True
        super()._write_held_output(transport)
        self.transport.is_observed = False


class Client:
    """One client connection."""

    def __init__(self, harness: Harness, number: int) -> None:
        self.harness = harness
        self.model = ClientModel(harness.shared, harness.coverage, harness.limits.max_line)
        self.transport = Transport(number, self._receive, self._ended)
        self.half_closed = self.dropped = False
        self.connection = ObservedConnection(
            harness.handler, harness.limits, harness.admission, find_handler=harness.find_handler
        )
        self.connection.transport, self.transport.protocol = self.transport, self.connection
        self.connection.connection_made(self.transport)

    @property
    def open(self) -> bool:
        """True if commands can be sent and will get replies."""
        return not (self.transport.closing or self.half_closed or self.dropped or self.model.close_reason)

    def send(self, data: bytes) -> None:
        """Send bytes. A `ping` follows each `hello`: its `pong` ends the messages about a resumed session."""
        has_hello = b"hello" in self.model.splitter.rest + data
        for part in re.split(rb"(?<=\n)", data) if has_hello else [data]:
            commands = self.model.send(part, self.harness.now_ms)
            self.harness.lines += len(commands)
            self.transport.send_input(part)
            if commands and isinstance(commands[-1].decoded, Hello) and not self.model.splitter.ended:
                self.model.send(PING, self.harness.now_ms)
                self.harness.lines += 1
                self.transport.send_input(PING)

    def _receive(self, data: bytes) -> None:
        if self.dropped:
            return
        try:
            self.model.receive(data)
        except Violation as violation:
            self.harness.fail(violation)

    def _ended(self) -> None:
        """Check that the server had a reason if it closed the connection."""
        if not self.transport.closed_by_server or self.harness.killing or self.dropped:
            return
        if self.half_closed or self.model.close_reason:
            self.harness.coverage[f"closed: {self.model.close_reason or 'half-closed'}"] += 1
            unanswered = [command for command in self.model.pending if not self.model.may_be_unanswered(command)]
            if self.half_closed and not self.model.close_reason and not self.model.is_taken_over and unanswered:
                self.harness.fail(Violation(f"a half-closed connection got no reply: {unanswered[:3]}"))
        elif self.model.is_taken_over:
            self.harness.coverage["closed: stolen"] += 1
        else:
            self.harness.fail(
                Violation(f"the server closed a connection without a reason; pending: {list(self.model.pending)[:3]}")
            )


class Harness:
    """One scenario. The public methods are its steps."""

    def __init__(self, coverage: Counter[str]) -> None:
        self.coverage = coverage
        self.loop = asyncio.get_running_loop()
        self.shared = SharedModel()
        self.clients: dict[int, Client] = {}
        self.others: list[Client] = []
        """Clients whose sessions were taken over, and that are still open."""
        self.lines = 0
        self.killing = self.was_unavailable = False
        self.problem: BaseException | None = None
        self._numbers = 0

    @property
    def now_ms(self) -> float:
        return self.loop.time() * 1000

    def find_handler(self, namespace: str | None) -> Any:
        """Return the handler of a namespace, or the error if there is none."""
        if namespace in (None, NAMESPACE):
            return self.handler
        return RequestRejected(Code.UNKNOWN_NAMESPACE, f"this server does not serve the namespace {namespace!r}")

    def fail(self, error: BaseException) -> None:
        """Record a failure, of which only the first is reported."""
        self.problem = self.problem or error

    # -- steps of the server ------------------------------------------------------------------------------

    async def begin(self, durable: bool, limits: dict[str, Any]) -> None:
        """Start the server."""
        self.limits = Limits(**limits)
        self.store: MemoryStore = FuzzStore() if durable else MemoryStore()
        self.stats = Stats()
        self.admission = AdmissionControl(self.limits)
        await self._acquire_leadership()

    async def _acquire_leadership(self) -> None:
        """Start a pipeline that leads from the stored state, as a namespace does when it takes over."""
        if isinstance(self.store, FuzzStore):
            state = self.store.state_machine()
        else:
            state = await self.store.open(None, None, None)  # type: ignore[arg-type]
        manager, clock_started_at = state.manager, self.now_ms - state.clock_ms
        manager.lead(min_id=100, unix_offset_ms=1.79e12, lock_order=None)
        self.handler: Any = FollowerHandler(self.stats, NAMESPACE, 1 << 20, Starting)
        self.pipeline = Pipeline(
            manager, self.store, self.limits, self.stats, lambda: self.now_ms - clock_started_at, self._failed
        )
        await self.pipeline.recover(state.retained_replies.values())
        await self._run_until_idle()
        self.handler.hand_over([client.connection for client in self.clients.values()], self.pipeline)
        self.handler = self.pipeline

    def _failed(self, error: BaseException) -> None:
        """Handle the end of a pipeline: only lost leadership after an outage is expected."""
        if not isinstance(error, LeadershipLost) or not self.was_unavailable:
            self.fail(error)
        self.coverage["leadership lost"] += 1
        self._abort_all()

    def _abort_all(self) -> None:
        self.killing = True
        self.handler = FollowerHandler(self.stats, NAMESPACE, 1 << 20, Starting)
        for connection in list(self.admission):
            connection.abort()

    async def slow_store(self, delay_s: float) -> None:
        """Set the duration of a commit."""
        if isinstance(self.store, FuzzStore):
            self.store.delay_s = delay_s

    async def store_outage(self, ms: float) -> None:
        """Make the store unavailable for a while, in which clients send commands."""
        if isinstance(self.store, FuzzStore) and not self.killing:
            self.store.unavailable = self.was_unavailable = True
            await asyncio.sleep(ms / 2000)
            for client in list(self.clients.values()):
                if client.open:
                    client.send(PING + make_line("request", resources=["exclusive:a"], ref="r1") + b"\n")
            await asyncio.sleep(ms / 2000)
            self.coverage["store unavailable"] += 1
            if self.killing:
                await self._restart()
            self.store.unavailable = False
            self.store.acknowledge()
            await self.settle()
            self.was_unavailable = False

    async def crash(self, stored: bool, late: bool) -> None:
        """Crash the server; another takes over the stored state. `late`: clients connect before it is the leader."""
        if not isinstance(self.store, FuzzStore):
            return
        self.pipeline.stop()
        self._abort_all()
        if stored:
            self.store.apply_pending()
        if late:
            await self._run_rounds(2)
            self.killing = False
            client = self._client(0)
            client.send(
                make_line("hello", session="secret-number-one")
                + b"\n"
                + make_line("request", resources=["exclusive:a"])
                + b"\n"
            )
            await self._run_rounds(2)
        await self._restart()

    async def _restart(self) -> None:
        self.pipeline.stop()
        await self._run_rounds(3)
        self.coverage["server restarted"] += 1
        await self._acquire_leadership()
        self.killing = False

    # -- steps of clients ---------------------------------------------------------------------------------

    def _client(self, slot: int) -> Client:
        """Return the open connection of a slot, a new one if necessary."""
        client = self.clients.get(slot)
        if client is None or not client.open:
            if client is not None:
                self.others.append(client)
            self._numbers += 1
            client = self.clients[slot] = Client(self, self._numbers)
        return client

    async def send(self, slot: int, data: bytes, cuts: tuple[float, ...]) -> None:
        """Send bytes in pieces."""
        client = self._client(slot)
        data = ID_PLACEHOLDER.sub(lambda found: b"%d" % self.shared.recent_id(int(found[1])), data)
        bounds = [0, *(int(cut * len(data)) for cut in cuts), len(data)]
        for begin, end in pairwise(bounds):
            client.send(data[begin:end])
            if len(cuts) > 2:
                await self._run_rounds(1)

    async def hello(
        self,
        slot: int,
        secret: str,
        timeout_ms: float,
        keep_old: bool,
        options: dict[str, Any],
        before: tuple[bytes, ...],
    ) -> None:
        """Open a connection with a session, and drop the old connection of the slot, unless it is to be kept.

        `before` are lines that it sends first, each a `hello` that is rejected. `options` are further fields of `hello`.
        """
        old = self.clients.pop(slot, None)
        if old is not None and old.open and not keep_old:
            old.dropped = True
            old.transport.drop()
        elif old is not None:
            self.others = [other for other in self.others if not other.transport.ended] + [old]
        client = self._client(slot)
        client.send(b"".join(line + b"\n" for line in before))
        client.send(make_line("hello", session=secret, sessionTimeout=timeout_ms, **options) + b"\n")

    async def send_invalid(self, slot: int, lines: tuple[bytes, ...]) -> None:
        """Send lines, and check that those with an error as reply changed nothing."""
        client = self._client(slot)
        await self.settle()
        if not client.open or client.transport.paused or self.killing:
            return
        for line in lines:
            text = ID_PLACEHOLDER.sub(lambda found: b"%d" % self.shared.recent_id(int(found[1])), line)
            before, errors, others = self._state(), self.coverage["received error"], self._count_other_messages()
            client.send(text + b"\n")
            await self._run_rounds(3)
            only_errors = (
                client.open and self.coverage["received error"] > errors and self._count_other_messages() == others
            )
            if only_errors and self._state() != before:
                self.fail(Violation(f"a rejected command changed the state: {text!r}"))

    def _count_other_messages(self) -> int:
        """Return how many messages other than errors all clients have received."""
        return sum(
            count
            for word, count in self.coverage.items()
            if word.startswith("received ") and not word.startswith("received error")
        )

    def _state(self) -> Any:
        """Return the state that no rejected command may change."""
        table, dispatcher = self.pipeline.manager.table, self.pipeline._dispatcher
        rows = [
            (
                id_,
                request.state,
                request.deadline,
                request.fence,
                request.ref,
                request.queue_entry and request.queue_entry[:2],
            )
            for requests in (table.held, table.waiting)
            for id_, request in requests.items()
        ]
        prefixes = {prefix: len(watchers) for prefix, watchers in dispatcher.watches.prefixes.items()}
        return rows, prefixes, len(dispatcher.sessions), [session.live_requests for session in dispatcher.sessions]

    async def half_close(self, slot: int) -> None:
        """Half-close a connection."""
        client = self.clients.get(slot)
        if client is not None and client.open:
            client.half_closed = True
            client.transport.send_input(None)

    async def drop(self, slot: int) -> None:
        """Drop a connection."""
        client = self.clients.pop(slot, None)
        if client is not None:
            client.dropped = True
            client.transport.drop()

    async def stall(self, slot: int) -> None:
        """Stop reading from a connection."""
        client = self.clients.get(slot)
        if client is not None:
            client.transport.stalled = True

    async def drain(self, slot: int) -> None:
        """Read from a connection again."""
        client = self.clients.get(slot)
        if client is not None:
            client.transport.drain()

    # -- time ---------------------------------------------------------------------------------------------

    async def wait(self, ms: float) -> None:
        """Advance the clock."""
        await asyncio.sleep(ms / 1000)

    async def run_briefly(self) -> None:
        """Run two iterations of the event loop, and check what holds at any time."""
        await self._run_rounds(2)
        self._check_always()

    async def _run_rounds(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0)

    async def _run_until_idle(self) -> None:
        """Run the event loop until all commands are executed, all batches are committed, and no deadline has passed.

        The timer of a deadline fires up to a millisecond late. In this time, any batch may end the request.
        """
        pipeline = self.pipeline
        for _ in range(MAX_ROUNDS):
            is_overdue = pipeline._expiry.at <= pipeline.now
            await asyncio.sleep(0.01 if pipeline._commits.in_flight else 0.001 if is_overdue else 0)
            is_busy = pipeline._scheduler or pipeline._commits.in_flight or pipeline._scheduled
            if pipeline._stopped or not (is_busy or pipeline._expiry.at <= pipeline.now):
                break
        else:
            self.fail(Violation("the server does not become idle"))
        await self._run_rounds(3)

    async def settle(self) -> None:
        """Wait until every reply is sent, and check that clients, lock manager and store agree."""
        if self.killing:
            await self._restart()
        await self._run_until_idle()
        while self.pipeline._deferred._connections:  # watchers are notified with a delay
            await asyncio.sleep(WATCH_FLUSH_INTERVAL_S)
            await self._run_until_idle()
        self._check_always()
        if self.problem is None and not self.pipeline._scheduler and not self.pipeline._commits.in_flight:
            self._check_agreement()

    async def end(self) -> None:
        """Disconnect all clients, and check that nothing remains after all timeouts."""
        for client in [*self.clients.values(), *self.others]:
            client.transport.drain()
        await self.settle()
        for client in self.others:
            client.dropped = True
            client.transport.drop()
        for slot in list(self.clients):
            await self.drop(slot)
        await asyncio.sleep(EXPIRY_S)
        await self._run_until_idle()
        table, dispatcher = self.pipeline.manager.table, self.pipeline._dispatcher
        left = (len(table.held), len(table.waiting), len(dispatcher.sessions), len(self.admission))
        if left != (0, 0, 0, 0) or dispatcher.watches.prefixes or self.pipeline._scheduler.bytes:
            self.fail(Violation(f"remaining: {left} held, waiting, sessions, connections"))
        if isinstance(self.store, FuzzStore) and self.store.records:
            self.fail(Violation(f"remaining in the store: {self.store.records}"))
        self.pipeline.stop()

    # -- checks ------------------------------------------------------------------------------------------

    def _check_always(self) -> None:
        """Check what holds at any time."""
        try:
            check(self.pipeline.manager)
            self.shared.check_fences()
        except AssertionError as violation:
            self.fail(violation)

    def _check_agreement(self) -> None:
        """Check that the clients, the lock manager and the store agree."""
        table = self.pipeline.manager.table
        for client in self.clients.values():
            self._check_client(client)
        self._check_mutual_exclusion()
        models = {client.connection: client.model for client in self.clients.values() if client.open}
        for request in [*table.held.values(), *table.waiting.values()]:
            connection = None if request.origin is None else request.origin.connection  # type: ignore[attr-defined]
            known = self.shared.requests.get(request.id)
            if connection is None or connection.closed:
                lasts = request.origin is not None and request.origin.key is not None
                cut_off = (
                    connection is not None and connection in self.admission._open
                )  # the client has some seconds to read
                if not lasts and not cut_off and (request.state is not HELD or request.release_on_disconnect):
                    self.fail(Violation(f"{request} should have ended with its connection"))
                continue
            state = "held" if request.state is HELD else "queued"
            if state == "queued" and request.ref is not None and request.origin.quiet:  # type: ignore[union-attr]
                continue  # no message is sent about it; `_check_client` checks those
            if known is None or known.state != state or (state == "held" and known.fence != request.fence):
                self.fail(Violation(f"{request} is {state}, and its client knows {known}"))
            elif connection in models and request.id not in models[connection].received_ids:
                self.fail(Violation(f"{request} is {state}, and this connection got no message"))
        if isinstance(self.store, FuzzStore):
            whole = self.pipeline.snapshot().changes
            # The retained reply of a request that ended at once need not be stored: the client repeats the request.
            stored = {
                id_
                for id_, change in whole.items()
                if not isinstance(change, RetainedReply) or id_ in self.store.records
            }
            if stored != self.store.records.keys():
                self.fail(Violation(f"stored: {sorted(self.store.records)}, in memory: {sorted(whole)}"))

    def _check_mutual_exclusion(self) -> None:
        """Check that no two clients hold a lock in conflicting modes, according to their messages alone."""
        holders: list[tuple[str, str, Any, KnownRequest]] = []
        for model in (client.model for client in self.clients.values() if client.open):
            for id_ in model.received_ids:
                known = self.shared.requests[id_]
                if known.state != "held" or known.command is None or known.owner != model.owner:
                    continue
                owner = known.command.request.transaction or id_
                holders += [(name, mode, owner, known) for name, mode in known.modes.items()]
        units: dict[str, list[tuple[int, UnitCount]]] = {}
        for number, (name, mode, owner, known) in enumerate(holders):
            if "/" in mode:
                units.setdefault(name, []).append((known.fence or 0, units_of(mode)))
            for other_name, other_mode, other_owner, other in holders[:number]:
                if owner != other_owner and overlap(name, other_name) and exclude(mode, other_mode):
                    self.fail(Violation(f"{known.id} holds {mode}:{name}, and {other.id} {other_mode}:{other_name}"))
        for name, held in units.items():
            if sum(count for _, (count, _) in held) > max(held)[1][1]:  # the limit of the last one that was granted
                self.fail(Violation(f"too many units of {name} are held: {held}"))

    def _check_client(self, client: Client) -> None:
        """Check that a client got all replies, and that its messages and events agree with the lock table."""
        model, table = client.model, self.pipeline.manager.table
        if not client.open or client.transport.paused or client.transport.unread_input:
            return
        unanswered = [command for command in model.pending if not model.may_be_unanswered(command)]
        if unanswered:
            self.fail(Violation(f"no reply to {unanswered[:3]}"))
        silent = {
            command.ref or ""
            for command in [*model.unanswered_requests.values(), *model.pending]
            if command not in unanswered
        }
        silent = {ref for ref in silent if self.shared.request_with_ref(model.owner, ref) is None}
        waiting = {request.ref for request in table.waiting.values() if request.origin is client.connection.session}
        if silent - waiting:
            self.fail(Violation(f"{silent - waiting} of a quiet client are not queued, and it got no message"))
        for id_ in model.received_ids:
            known = self.shared.requests[id_]
            where = "held" if id_ in table.held else "queued" if id_ in table.waiting else "ended"
            if known.owner == model.owner and known.state != where:
                self.fail(Violation(f"{id_} is {where}, and according to its client {known.state}"))
        if model.watched:
            held = {
                (name, request.id): lock_text(name, mode, request.units.get(name)).partition(":")[0]
                for request in table.held.values()
                for name, mode in request.modes()
                if model._watches(name)
            }
            if held != model.watched_locks:
                self.fail(
                    Violation(f"the watcher of {list(model.watched)} knows {model.watched_locks}, and held is {held}")
                )
