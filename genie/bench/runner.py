"""Runs workloads against a server: opens the connections, warms up, measures, and releases all locks.

One event loop serves all connections, without a task or a future for each request. A latency ends when this process
reads the reply. If this process lacks CPU time, it reads replies late. So the result includes the CPU usage.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from genie.bench.generator import WORKLOADS, LoadConnection, Tally, WorkloadParameters
from genie.client.config import KEEPALIVE_IDLE_S, Address, format_address, resolve_token
from genie.errors import Unavailable
from genie.net import enable_keepalive
from genie.protocol import messages
from genie.tls import describe_error

TICK_INTERVAL_S = 0.1
"""Interval at which idle slots send a request, and at which the progress is reported."""
MAX_CONCURRENT_CONNECTS = 64
"""Maximum connections that are opened concurrently. The number is less than the listen backlog of a server."""

INTERRUPTS_TO_ABORT = 2
"""Number of interrupts (Ctrl-C) after which the runner stops waiting for the server's confirmation of the releases."""

NOT_RELEASED = "not-released"
CONNECTION_LOST = "connection-lost"

ProgressCallback = Callable[[str, float | None, int], None]
"""Called with the workload, the seconds measured so far, and the cycles completed in that time.

The seconds are None during the warm-up.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options with which each workload is run."""

    address: Address
    connections: int
    depth: int
    """Requests in flight on each connection."""
    measure_s: float
    warm_up_s: float
    """Time that a workload runs before the measurement."""
    timeout_s: float
    """Time limit in seconds for opening all connections, and again for releasing all locks at the end."""
    parameters: WorkloadParameters
    namespace: str | None = None
    """Namespace of the locks. None for the first namespace of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The measurements of one workload."""

    workload: str
    connections: int
    """Connections that were open until the end of the measured time."""
    measured_s: float
    """Duration of the measurement; 0 if the workload ended before the measurement began."""
    client_cpu_s: float
    """CPU time of this process during the measurement."""
    tally: Tally
    connection_error: str = ""
    """Why the last connection ended, if all connections ended during the run. Otherwise empty."""

    @property
    def cycles(self) -> int:
        """Cycles completed in the measured time."""
        return self.tally.to_released.count

    @property
    def cycles_per_s(self) -> float:
        """Cycles per second, or 0 if nothing was measured."""
        return self.cycles / self.measured_s if self.measured_s else 0.0

    @property
    def client_cpu_percent(self) -> float:
        """CPU usage of this process in percent. Near 100 %, this process limits the throughput, not the server."""
        return 100 * self.client_cpu_s / self.measured_s if self.measured_s else 0.0


class _LoadProtocol(asyncio.Protocol):
    """Passes received bytes to a `LoadConnection`, and sends the bytes that the `LoadConnection` returns."""

    def __init__(self, connection: LoadConnection, runner: LoadRunner) -> None:
        self.connection = connection
        self.closing = False
        """True if this process closes the connection, so that its end is not an error."""
        self._runner = runner
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        enable_keepalive(transport.get_extra_info("socket"), idle_s=KEEPALIVE_IDLE_S)
        self._runner.protocols.add(self)
        self._write(self._runner.hello)

    def data_received(self, data: bytes) -> None:
        self._write(self.connection.receive(data, time.perf_counter_ns()))
        if self.connection.protocol_error:
            self.abort()
        elif self.connection.stopping:
            self._close_if_finished()

    def connection_lost(self, exc: Exception | None) -> None:
        self._runner.on_connection_lost(self, str(exc) if exc else "the server closed it")

    def tick(self) -> None:
        """Send the requests of idle slots, and the releases that the server rejected."""
        self._write(self.connection.tick(time.perf_counter_ns()))

    def stop(self) -> None:
        """Release all requests. The connection is closed when the server has confirmed all releases."""
        self._write(self.connection.stop())
        self._close_if_finished()

    def abort(self) -> None:
        """Close the connection immediately. The server then releases the remaining requests."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)

    def _close_if_finished(self) -> None:
        """Close the connection if the server has confirmed the end of all its requests."""
        if not self.connection.unfinished_count and self._transport is not None:
            self.closing = True
            self._transport.close()


class LoadRunner:
    """Runs workloads, one after another. `interrupt` ends the current workload early, with the results so far."""

    def __init__(self, options: BenchOptions, on_progress: ProgressCallback) -> None:
        self.protocols: set[_LoadProtocol] = set()
        """The open connections."""
        self.interrupt_count = 0
        """Number of calls of `interrupt`."""
        self._options = options
        identity = {"token": resolve_token(), "namespace": options.namespace}
        self.hello = messages.command("hello", **identity) if any(identity.values()) else b""
        """Encoded first command of each connection. Empty if there is neither a token nor a namespace."""
        self._on_progress = on_progress
        self._prefix = f"genie-bench/{secrets.token_hex(8)}/"
        """Random prefix of all resource names, so that no other client waits for these resources."""
        self._tally = Tally()
        self._connection_error = ""
        """Why the connection that was lost last has ended."""
        self._wake = asyncio.Event()
        """Set to end the current wait early: after an interrupt, or when all connections have ended."""
        self._connect_timeout: asyncio.Timeout | None = None
        """The time limit for opening connections. None unless they are being opened."""

    def interrupt(self) -> None:
        """End the run early.

        After the first call no new requests are sent, and the run waits until the server has confirmed all releases.
        The second call ends this wait.
        """
        self.interrupt_count += 1
        self._wake.set()
        if self._connect_timeout is not None:
            self._connect_timeout.reschedule(0)  # stop opening connections

    def on_connection_lost(self, protocol: _LoadProtocol, reason: str) -> None:
        """Remove a lost connection. Count an error unless this process closed the connection.

        If an error of this connection was counted before, its loss is not counted as a second error. The loss of the
        last connection ends the run.
        """
        self.protocols.discard(protocol)
        if not protocol.closing:
            counted_error = protocol.connection.protocol_error or protocol.connection.rejection
            if not counted_error:
                self._tally.errors[CONNECTION_LOST] += 1
            self._connection_error = counted_error or reason
        if not self.protocols:
            self._wake.set()

    async def run(self, workload: str) -> Result:
        """Run a workload: open the connections, warm up, measure, and release all locks.

        Raises Unavailable if the server cannot be reached. Nothing is measured if an interrupt, or the loss of all
        connections, ends the warm-up.
        """
        tally = self._tally = Tally()
        self._connection_error = ""
        measured_s = cpu_s = 0.0
        try:
            if await self._connect(workload):
                self._tick()
                await self._generate_load(  # None: nothing is measured yet
                    self._options.warm_up_s, on_tick=lambda _elapsed_s: self._on_progress(workload, None, 0)
                )
            if self.protocols and not self.interrupt_count:
                started_s, cpu_started_s = time.perf_counter(), time.process_time()
                tally.measuring = True
                await self._generate_load(
                    self._options.measure_s,
                    on_tick=lambda elapsed_s: self._on_progress(workload, elapsed_s, tally.to_released.count),
                )
                tally.measuring = False
                measured_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
            connections = len(self.protocols)
            connection_error = "" if self.protocols or self.interrupt_count else self._connection_error
            await self._release_all()
        finally:
            for protocol in self.protocols.copy():
                protocol.abort()
            self.protocols.clear()
        return Result(
            workload=workload,
            connections=connections,
            measured_s=measured_s,
            client_cpu_s=cpu_s,
            tally=tally,
            connection_error=connection_error,
        )

    async def _connect(self, workload: str) -> bool:
        """Open all connections, `MAX_CONCURRENT_CONNECTS` at a time. Return False after an interrupt.

        Raises Unavailable if a connection fails, or if not all connections are open within the timeout.
        """
        options = self._options
        prefix, slot_count = f"{self._prefix}{workload}/", options.connections * options.depth
        slots = WORKLOADS[workload].encode_slots(prefix, options.parameters, slot_count)
        protocols = [
            _LoadProtocol(LoadConnection(slots[index :: options.connections], self._tally), self)
            for index in range(options.connections)
        ]
        try:
            async with asyncio.timeout(options.timeout_s) as self._connect_timeout:
                for start in range(0, options.connections, MAX_CONCURRENT_CONNECTS):
                    await self._open(protocols[start : start + MAX_CONCURRENT_CONNECTS])
        except (OSError, UnicodeError) as error:
            if self.interrupt_count:
                return False
            cause = (
                f"the others timed out after {options.timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else describe_error(error)
            )
            accepted = f"{len(self.protocols)} of {options.connections} connections"
            raise Unavailable(f"{format_address(options.address)} accepted {accepted}: {cause}") from None
        finally:
            self._connect_timeout = None
        return True

    async def _open(self, protocols: list[_LoadProtocol]) -> None:
        """Open connections concurrently. If attempts fail, raise the error of the first of them.

        The error is raised when all attempts have ended, so that none opens a connection later.
        """
        loop = asyncio.get_running_loop()
        address = self._options.address
        context = address.context()
        attempts = [
            loop.create_connection(lambda protocol=protocol: protocol, address.host, address.port, ssl=context)
            for protocol in protocols
        ]
        for connection_or_error in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(connection_or_error, BaseException):
                raise connection_or_error

    async def _generate_load(self, seconds: float, on_tick: Callable[[float], None]) -> None:
        """Serve the connections for some seconds, or until an interrupt, or until no connection is left.

        Calls `on_tick` after each tick with the seconds since the start.
        """
        started_s = time.perf_counter()
        while (
            self.protocols
            and not self.interrupt_count
            and (remaining_s := seconds + started_s - time.perf_counter()) > 0
        ):
            await self._wait_for_tick(remaining_s)
            self._tick()
            on_tick(time.perf_counter() - started_s)

    async def _release_all(self) -> None:
        """Release all requests, and wait until the server has confirmed the releases or the timeout has passed.

        Unconfirmed releases are counted as errors. The server releases these requests when `run` closes the connections.
        """
        for protocol in self.protocols.copy():
            protocol.stop()
        deadline_s = time.perf_counter() + self._options.timeout_s
        while (
            self.protocols
            and self.interrupt_count < INTERRUPTS_TO_ABORT
            and (remaining_s := deadline_s - time.perf_counter()) > 0
        ):
            await self._wait_for_tick(remaining_s)
            self._tick()
        for protocol in self.protocols:
            protocol.closing = True  # `run` aborts the remaining connections
            self._tally.errors[NOT_RELEASED] += protocol.connection.unfinished_count

    async def _wait_for_tick(self, remaining_s: float) -> None:
        """Wait for the next tick, but at most `remaining_s` seconds.

        An interrupt or the loss of all connections ends the wait.
        """
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(remaining_s, TICK_INTERVAL_S)):
                await self._wake.wait()

    def _tick(self) -> None:
        """Send the requests of idle slots, and rejected releases again, on all connections."""
        for protocol in self.protocols:
            protocol.tick()
