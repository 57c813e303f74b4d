"""The load on its connections: opens them, lets them run for a while, measures, and leaves nothing behind.

All connections belong to one event loop, without a task or a future for a request. The time of an answer is when this
process reads it. A client that is short of a processor reads late, so the result says how much of one it used.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from genie.bench.generator import WORKLOADS, LoadConnection, Shape, Tally
from genie.client.config import KEEPALIVE_IDLE_S, Address, find_token, format_address
from genie.errors import Unavailable
from genie.net import enable_keepalive
from genie.protocol import messages
from genie.tls import reason

TICK_S = 0.1
"""How often those who rest ask again, and the progress is told."""
MAX_CONCURRENT_CONNECTS = 64
"""Connections that are opened at the same time: fewer than a server's queue for new ones has places."""

MAX_INTERRUPTS = 2
"""So many interrupts end the cleaning up, too."""

NOT_RELEASED = "not-released"
CONNECTION_LOST = "connection-lost"

Watch = Callable[[str, float | None, int], None]
"""Is told the workload, the seconds measured so far (None: it warms up), and the cycles counted in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """How to run each workload. `timeout_s` bounds the connecting, and the cleaning up."""

    address: Address
    connections: int
    depth: int
    """Requests in flight on each connection."""
    measure_s: float
    warm_up_s: float
    timeout_s: float
    shape: Shape
    namespace: str | None = None
    """None: the server's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was measured of one workload. `lost` says why it ended early where the connections did."""

    workload: str
    connections: int
    """Those that were there for all of the measured time."""
    measured_s: float
    """0: it ended before it was measured."""
    client_cpu_s: float
    """What this process used meanwhile, of one processor."""
    tally: Tally
    lost: str = ""

    @property
    def cycles(self) -> int:
        """How many ended in that time."""
        return self.tally.to_released.count

    @property
    def cycles_per_s(self) -> float:
        """On the average; 0 where no time was measured."""
        return self.cycles / self.measured_s if self.measured_s else 0.0

    @property
    def client_cpu_percent(self) -> float:
        """How busy this process was; near 100 it is itself what limits the result."""
        return 100 * self.client_cpu_s / self.measured_s if self.measured_s else 0.0


class _LoadProtocol(asyncio.Protocol):
    def __init__(self, cycles: LoadConnection, load: LoadRunner) -> None:
        self.cycles = cycles
        self.ending = False
        self._load = load
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        enable_keepalive(transport.get_extra_info("socket"), idle_s=KEEPALIVE_IDLE_S)
        self._load.wires.add(self)
        self._write(self._load.hello)

    def data_received(self, data: bytes) -> None:
        self._write(self.cycles.receive(data, time.perf_counter_ns()))
        if self.cycles.broken:
            self.abort()
        elif self.cycles.stopping:
            self._close_if_done()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost(self, str(exc) if exc else "the server closed it")

    def tick(self) -> None:
        self._write(self.cycles.tick(time.perf_counter_ns()))

    def stop(self) -> None:
        self._write(self.cycles.stop())
        self._close_if_done()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)

    def _close_if_done(self) -> None:
        if not self.cycles.owed and self._transport is not None:
            self.ending = True
            self._transport.close()


def _same(wire: _LoadProtocol) -> _LoadProtocol:
    return wire


class LoadRunner:
    """Runs workloads, one after the other. `interrupt` ends it early, with what was measured until then."""

    def __init__(self, plan: BenchOptions, watch: Watch) -> None:
        self.wires: set[_LoadProtocol] = set()
        """The connections that are open."""
        self.interrupts = 0
        self._plan = plan
        said = {"token": find_token(), "namespace": plan.namespace}
        self.hello = messages.command("hello", **said) if any(said.values()) else b""
        """What each connection says first."""
        self._watch = watch
        self._prefix = f"genie-bench/{secrets.token_hex(8)}/"
        self._tally = Tally()
        self._why = ""
        self._wake = asyncio.Event()
        self._connecting: asyncio.Timeout | None = None

    def interrupt(self) -> None:
        """End early; the second time, don't wait until the server has confirmed that all is released."""
        self.interrupts += 1
        self._wake.set()
        if self._connecting is not None:
            self._connecting.reschedule(0)

    def lost(self, wire: _LoadProtocol, why: str) -> None:
        """A connection has ended."""
        self.wires.discard(wire)
        if not wire.ending:
            counted = wire.cycles.broken or wire.cycles.refused
            if not counted:
                self._tally.errors[CONNECTION_LOST] += 1
            self._why = counted or why
        if not self.wires:
            self._wake.set()

    async def run(self, workload: str) -> Result:
        """Connect, warm up, measure, clean up. Unavailable, if the server can't be reached.

        Where an interrupt, or the end of all connections, comes before the measuring, nothing is measured.
        """
        tally = self._tally = Tally()
        self._why = ""
        plan = self._plan
        measured_s = cpu_s = 0.0
        try:
            if await self._connect(workload):
                self._tick()
                await self._go_on(plan.warm_up_s, lambda _: self._watch(workload, None, 0))
            if self.wires and not self.interrupts:
                began_s, cpu_s = time.perf_counter(), -time.process_time()
                tally.measuring = True
                await self._go_on(plan.measure_s, lambda past_s: self._watch(workload, past_s, tally.to_released.count))
                tally.measuring = False
                measured_s = time.perf_counter() - began_s
                cpu_s += time.process_time()
            connections = len(self.wires)
            lost = "" if self.wires or self.interrupts else self._why
            await self._clean_up()
        finally:
            for wire in self.wires.copy():
                wire.abort()
            self.wires.clear()
        return Result(
            workload=workload,
            connections=connections,
            measured_s=measured_s,
            client_cpu_s=cpu_s,
            tally=tally,
            lost=lost,
        )

    async def _connect(self, workload: str) -> bool:
        """Open the connections; False, if that was interrupted."""
        plan = self._plan
        slots = WORKLOADS[workload].slots(f"{self._prefix}{workload}/", plan.shape, plan.connections * plan.depth)
        wires = [
            _LoadProtocol(LoadConnection(slots[n :: plan.connections], self._tally), self)
            for n in range(plan.connections)
        ]
        try:
            async with asyncio.timeout(plan.timeout_s) as bound:
                self._connecting = bound
                try:
                    for first in range(0, plan.connections, MAX_CONCURRENT_CONNECTS):
                        await self._open(wires[first : first + MAX_CONCURRENT_CONNECTS])
                finally:
                    self._connecting = None
        except (OSError, UnicodeError) as error:
            if self.interrupts:
                return False
            why = f"no more within {plan.timeout_s:g} s" if isinstance(error, TimeoutError) else reason(error)
            took = f"{len(self.wires)} of {plan.connections} connections"
            raise Unavailable(f"{format_address(plan.address)} took {took}: {why}") from None
        return True

    async def _open(self, wires: list[_LoadProtocol]) -> None:
        loop = asyncio.get_running_loop()
        host, port, tls = self._plan.address
        creating = [loop.create_connection(partial(_same, wire), host, port, ssl=tls) for wire in wires]
        for done in await asyncio.gather(*creating, return_exceptions=True):  # so none is opened behind our back later
            if isinstance(done, BaseException):
                raise done

    async def _go_on(self, seconds: float, tell: Callable[[float], None]) -> None:
        """Let it run for so long, or until there is nobody left to run for."""
        began_s = time.perf_counter()
        while self.wires and not self.interrupts and (left_s := seconds + began_s - time.perf_counter()) > 0:
            await self._pause(left_s)
            self._tick()
            tell(time.perf_counter() - began_s)

    async def _clean_up(self) -> None:
        """Release all, and wait for the answers; what stays open is cut, and so the server releases it."""
        for wire in self.wires.copy():
            wire.stop()
        end_s = time.perf_counter() + self._plan.timeout_s
        while self.wires and self.interrupts < MAX_INTERRUPTS and (left_s := end_s - time.perf_counter()) > 0:
            await self._pause(left_s)
            self._tick()
        for wire in self.wires:
            wire.ending = True
            self._tally.errors[NOT_RELEASED] += wire.cycles.owed

    async def _pause(self, left_s: float) -> None:
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, TICK_S)):
                await self._wake.wait()

    def _tick(self) -> None:
        for wire in self.wires:
            wire.tick()
