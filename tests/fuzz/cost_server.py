"""A server whose work is counted: in each iteration of the event loop, and for each byte that its clients send.

The server is the real one from `Connection` on, as in `harness`. The clock is virtual and deterministic: it advances with the
work of the server, so that the limits in seconds of the scheduler apply.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import genie
from fuzz.cost_steps import Step, lines
from fuzz.grammar import make_line
from fuzz.sent_commands import NAMESPACE
from fuzz.store import FuzzStore
from fuzz.transport import Transport
from genie.config import Limits
from genie.core import manager as manager_module
from genie.core.lock_order.analysis import LockOrder
from genie.errors import Code, RequestRejected
from genie.observability.stats import ContentionStats, Stats
from genie.protocol import commands
from genie.server.connection import Connection
from genie.server.listener import AdmissionControl
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from genie.testing.simulation.loop import SimLoop, deterministic
from work.opcodes import OpcodeCounter

PACKAGE = str(Path(genie.__file__).parent)
INSTRUCTION_S = 20e-9
"""Seconds for which the virtual clock advances with each instruction."""
READ_BYTES = 64 << 10
"""Bytes that a client sends in an iteration of the event loop."""
MAX_COUNTED = 10_000_000
"""Instructions of an iteration after which the sequence is aborted."""
MAX_SEQUENCE_WORK = 30_000_000
"""Instructions after which the remaining steps of a sequence are not played. After twice as many, the step ends, too."""
COMMIT_S = 0.0005
"""Duration of a commit."""
EXPIRY_S = 60.0
"""Longer than every timeout of a sequence."""
MAX_ROUNDS = 20_000
"""Iterations within which the server must become idle."""
CONNECTION_BYTES = 64
"""A step without input, such as a disconnect, counts as so many bytes."""

_collect_garbage, _thread_time = gc.collect, time.thread_time


@dataclass
class Iteration:
    """An iteration of the event loop: its work, and the command that caused it."""

    work: float = 0.0
    label: str = ""
    sent: int = 0
    """Bytes that the clients have sent in this iteration; at its end, those of the step up to this iteration."""


@dataclass
class Costs:
    """What a sequence cost. Work is a number of instructions or, if time is measured, of seconds."""

    work: float = 0.0
    sent: int = 0
    iterations: dict[str, Iteration] = field(default_factory=dict)
    """The most expensive iteration of each label."""
    per_byte: dict[str, float] = field(default_factory=dict)
    """The most work of a step for each byte sent in it, by label."""
    growth: float = 0.0
    """The most bytes of memory that were retained for each byte sent."""
    growth_label: str = ""
    residual_blocks: int = 0
    """Blocks of memory that are left after all clients, beyond those before the first client."""
    residual_bytes: int = 0
    residual_lines: list[str] = field(default_factory=list)
    """The lines of code that allocated most of what is left."""
    aborted: bool = False
    """True if an iteration exceeded `MAX_COUNTED`, so that the sequence was not played to its end."""
    exhausted: bool = False
    """True if a step took so much work in many iterations that it was not played to its end."""
    problem: str = ""
    """An error of the server; "" for none."""


class CostLoop(SimLoop):
    """The clock advances with the work. `meter` is called with the work of each iteration."""

    def __init__(self, spent: Callable[[], float]) -> None:
        super().__init__()
        self._spent, self._spent_before = spent, spent()
        self.meter: Callable[[float], None] = lambda _: None

    def time(self) -> float:
        return super().time() + self._spent() - self._spent_before

    def _run_once(self) -> None:
        super()._run_once()
        spent = self._spent() - self._spent_before
        self._now_s += spent
        self._spent_before += spent
        self.meter(spent)


class Runaway(KeyboardInterrupt):
    """An iteration exceeds `MAX_COUNTED`. Neither the server nor asyncio catches a KeyboardInterrupt."""


class WorkCounter(OpcodeCounter):
    """Counts the instructions of the server. Raises Runaway if an iteration exceeds `MAX_COUNTED`."""

    def __init__(self) -> None:
        super().__init__(lambda name: not name.startswith(PACKAGE) or "testing" in name)
        self.limit = MAX_COUNTED

    def _trace_call(self, frame: Any, *_: Any) -> Any:
        if self.count > self.limit:
            raise Runaway
        return super()._trace_call(frame)


class CostClient:
    """A client that sends, and counts what it receives."""

    def __init__(self, server: CostServer, number: int) -> None:
        self.transport = Transport(number, lambda _: None, lambda: None)
        self.half_closed = False
        self.transport.protocol = connection = Connection(
            server.pipeline, server.limits, server.admission, find_handler=server.find_handler
        )
        connection.connection_made(self.transport)

    @property
    def open(self) -> bool:
        return not (self.transport.closing or self.transport.ended or self.half_closed)


class CostServer:
    """Plays one sequence. The methods with the name of a step take the step."""

    def __init__(self, costs: Costs, count: Callable[[], float], *, durable: bool) -> None:
        self.costs, self._count, self._memory = costs, count, tracemalloc.is_tracing()
        self.clients: dict[int, CostClient] = {}
        self.limits, self.stats = Limits(), Stats()
        self.admission: AdmissionControl[Connection] = AdmissionControl(self.limits)
        self.store = FuzzStore() if durable else MemoryStore()
        self.current = Iteration()
        self.label = "begin"
        self._step_sent = 0
        self._last, self._numbers, self._base = count(), 0, (0, 0)

    def on_iteration(self) -> None:
        """Record the work of an iteration of the event loop."""
        count, costs, current = self._count(), self.costs, self.current
        current.work, self._last = count - self._last, count
        costs.work += current.work
        costs.sent += current.sent
        self._step_sent += current.sent
        current.sent = self._step_sent
        worst = costs.iterations.get(current.label)
        if current.label != "measure" and (worst is None or current.work > worst.work):
            costs.iterations[current.label] = current
        self.current = Iteration(label=self.label)

    def find_handler(self, namespace: str | None) -> Any:
        """Return the handler of a namespace, or the error if there is none."""
        if namespace in (None, NAMESPACE):
            return self.pipeline
        return RequestRejected(Code.UNKNOWN_NAMESPACE, "this server does not serve the namespace")

    async def begin(self) -> None:
        """Start the server, and measure its memory."""
        loop = asyncio.get_running_loop()
        if isinstance(self.store, FuzzStore):
            self.store.delay_s = COMMIT_S  # otherwise all batches would be executed in one iteration
            state = self.store.state_machine()
        else:
            state = await self.store.open(None, None, None)  # type: ignore[arg-type]
        manager = state.manager
        manager.lead(min_id=1_000_000, unix_offset_ms=1.79e12, lock_order=LockOrder())
        self.pipeline = Pipeline(
            manager, self.store, self.limits, self.stats, lambda: loop.time() * 1000, self._on_failed
        )
        await self.pipeline.recover(state.retained_replies.values())
        await self._send(0, [make_line("hello", session="session-to-warm-up") + b"\n", make_line("bye") + b"\n"])
        await self.settle()
        await self._leave()
        self._base = self._measure_memory()
        self._last = self._count()

    def _on_failed(self, error: BaseException) -> None:
        self.costs.problem = self.costs.problem or f"the server failed: {error!r}"

    def _measure_memory(self) -> tuple[int, int]:
        """Drop what has documented bounds, and return the number of blocks and bytes in use.

        That is the caches, the statistics of the most contended resources, and the recent deadlocks.
        """
        commands._single_resource_cache.clear()
        self.pipeline.manager._outcomes = manager_module.RecentOutcomes()
        self.pipeline.manager.lock_order = self.pipeline._dispatcher.manager.lock_order = LockOrder()
        self.stats.contention = ContentionStats()
        self.stats.deadlocks.clear()
        self.stats._deadlock_steps = 0
        _collect_garbage()
        if not self._memory:
            return 0, 0
        return len(_traces()), tracemalloc.get_traced_memory()[0]

    # -- steps --------------------------------------------------------------------------------------------

    async def play(self, step: Step) -> None:
        """Play one step, and record its work for each byte."""
        self.label = step["command"] if step["do"] == "send" else step["do"]
        await self._round()
        work, sent, self._step_sent = self.costs.work, self.costs.sent, 0
        await getattr(self, step["do"])(step)
        if step["settle"]:
            await self.settle()
        else:
            await self._round()
        per_byte = (self.costs.work - work) / max(self.costs.sent - sent, CONNECTION_BYTES)
        self.costs.per_byte[self.label] = max(per_byte, self.costs.per_byte.get(self.label, 0.0))
        if self._memory and self.costs.sent:
            unread = sum(client.transport.unread for client in self.clients.values())
            growth = (tracemalloc.get_traced_memory()[0] - self._base[1] + unread) / max(self.costs.sent, READ_BYTES)
            if growth > self.costs.growth:
                self.costs.growth, self.costs.growth_label = growth, self.label

    async def send(self, step: Step) -> None:
        """Send a burst of commands."""
        now_ms = asyncio.get_running_loop().time() * 1000
        await self._send(step["client"], lines(step, self.pipeline.manager.next_id, now_ms))

    async def hello(self, step: Step) -> None:
        """Open or resume a session on a new connection."""
        await self.drop(step)
        await self._send(step["client"], [_hello(step["session"], step["lasts"], step["quiet"])])

    async def drop(self, step: Step) -> None:
        """Drop a connection."""
        client = self.clients.pop(step["client"], None)
        if client is not None:
            client.transport.drop()

    async def half_close(self, step: Step) -> None:
        """Half-close a connection."""
        client = self.clients.get(step["client"])
        if client is not None and client.open:
            client.half_closed = True
            client.transport.send_input(None)

    async def stall(self, step: Step) -> None:
        """Stop reading from a connection."""
        self._client(step["client"]).transport.stalled = True

    async def drain(self, step: Step) -> None:
        """Read from a connection again."""
        client = self.clients.get(step["client"])
        if client is not None:
            client.transport.drain()

    async def wait(self, step: Step) -> None:
        """Advance the clock."""
        await asyncio.sleep(step["ms"] / 1000)

    async def storm(self, step: Step) -> None:
        """Open many connections, one in an iteration. Each one replaces the connection before it."""
        request = make_line("request", resources=["exclusive:r0"], onDisconnect="release") + b"\n"
        for _ in range(step["count"]):
            await self.drop(step)
            hello = [] if step["session"] is None else [_hello(step["session"], 50, quiet=False)]
            await self._send(step["client"], [*hello, *([request] if step["request"] else [])])
            await self._round()

    def _client(self, slot: int) -> CostClient:
        client = self.clients.get(slot)
        if client is None or not client.open:
            if client is not None:
                client.transport.drop()
            self._numbers += 1
            client = self.clients[slot] = CostClient(self, self._numbers)
        return client

    async def _send(self, slot: int, all_lines: Any) -> None:
        """Send lines in parts of about `READ_BYTES`, one in an iteration of the event loop."""
        client, rest = self._client(slot), iter(all_lines)
        while data := b"".join(_part(rest)):
            await self._round()
            for _ in range(MAX_ROUNDS):
                if not client.transport.paused or client.transport.stalled or not client.open:
                    break
                await asyncio.sleep(COMMIT_S if self.pipeline._commits.in_flight else 0)
                self.current.label = self.label
            if not client.open or client.transport.paused:
                return
            self.current.sent += len(data)
            client.transport.send_input(data)

    # -- time ---------------------------------------------------------------------------------------------

    async def _round(self) -> None:
        await asyncio.sleep(0)
        self.current.label = self.label

    async def settle(self) -> None:
        """Run the event loop until the server is idle."""
        pipeline = self.pipeline
        for _ in range(3):  # a lost connection is queued in the second iteration
            await self._round()
        for _ in range(MAX_ROUNDS):
            await asyncio.sleep(0.002 if pipeline._commits.in_flight else 0)
            self.current.label = self.label
            if not (pipeline._scheduler or pipeline._commits.in_flight or pipeline._scheduled) or pipeline._stopped:
                break
        else:
            self._on_failed(RuntimeError("it does not become idle"))
        await self._round()

    async def _leave(self) -> None:
        for client in self.clients.values():
            client.transport.drain()
            client.transport.drop()
        self.clients.clear()
        await self.settle()
        await asyncio.sleep(EXPIRY_S)
        await self.settle()

    async def end(self) -> None:
        """Drop all clients, wait for all timeouts, and measure the memory that is left."""
        self.label = "end"
        await self._leave()
        self.label = self.current.label = "measure"  # not work of the server
        blocks, size = self._measure_memory()
        costs = self.costs
        costs.residual_blocks, costs.residual_bytes = blocks - self._base[0], size - self._base[1]
        if self._memory:
            snapshot = tracemalloc.take_snapshot().statistics("lineno")
            costs.residual_lines = [str(line) for line in snapshot[:6]]
        self.pipeline.stop()


def _traces() -> Any:
    return tracemalloc.take_snapshot().traces


def _part(all_lines: Any) -> list[bytes]:
    part, size = [], 0
    for line in islice(all_lines, READ_BYTES):
        part.append(line)
        size += len(line)
        if size >= READ_BYTES:
            break
    return part


def _hello(session: int, lasts: float, quiet: bool) -> bytes:
    return make_line("hello", session=f"secret-of-session-{session}", sessionTimeout=lasts, quiet=quiet) + b"\n"


# -- Playing a sequence -------------------------------------------------------------------------------------


def play(steps: list[Step], *, durable: bool = False) -> Costs:
    """Play a sequence and count its instructions."""
    costs, counter = Costs(), WorkCounter()
    counter.start()
    try:
        _run(steps, costs, lambda: counter.count * INSTRUCTION_S, counter, durable=durable)
    finally:
        counter.stop()
    return costs


def play_for_memory(steps: list[Step], *, durable: bool = False) -> Costs:
    """Play a sequence and measure the memory that it makes the server retain. Its clock does not advance with its work."""
    costs = Costs()
    tracemalloc.start()
    try:
        _run(steps, costs, lambda: 0.0, None, durable=durable)
    finally:
        tracemalloc.stop()
    return costs


def play_for_time(steps: list[Step], *, durable: bool = False) -> Costs:
    """Play a sequence and measure the CPU time of its iterations."""
    costs = Costs()
    _run(steps, costs, _thread_time, None, durable=durable)
    return costs


def _run(
    steps: list[Step], costs: Costs, spent: Callable[[], float], counter: WorkCounter | None, *, durable: bool
) -> None:
    loop = CostLoop(spent)
    loop.set_exception_handler(lambda _, context: _note_error(costs, context.get("exception") or context["message"]))
    commands._single_resource_cache.clear()
    with deterministic(loop, seed=0):
        try:
            loop.run_until_complete(_play_steps(steps, costs, loop, counter, spent, durable=durable))
        except Runaway:
            costs.aborted = not costs.exhausted
        except Exception as error:  # noqa: BLE001 - every error is a failure
            _note_error(costs, error)
        finally:
            sys.settrace(None)
            loop.finish()


def _note_error(costs: Costs, error: object) -> None:
    costs.problem = costs.problem or repr(error)


async def _play_steps(
    steps: list[Step],
    costs: Costs,
    loop: CostLoop,
    counter: WorkCounter | None,
    spent: Callable[[], float],
    *,
    durable: bool,
) -> None:
    server = CostServer(costs, spent if counter is None else lambda: counter.count, durable=durable)

    def meter(_: float) -> None:
        server.on_iteration()
        if counter is not None:
            counter.limit = counter.count + MAX_COUNTED
            if costs.work > 2 * MAX_SEQUENCE_WORK:
                costs.exhausted = True
                raise Runaway

    loop.meter = meter
    await server.begin()
    costs.work, costs.sent = 0, 0
    costs.iterations.clear()
    try:
        for step in steps:
            await server.play(step)
            if counter is not None and costs.work > MAX_SEQUENCE_WORK:
                break
        await server.end()
    finally:
        server.on_iteration()
