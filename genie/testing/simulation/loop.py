"""An event loop with a virtual clock: sleeping takes no real time.

The loop runs ready callbacks in the order in which they became ready. When none is ready, it advances the clock to the
next timer. Connections are made in a simulated network (`network.py`).

Callbacks and tasks may belong to a *node*, which is a simulated process. The callbacks of a node that is killed never
run again. The callbacks of a node that is stopped are deferred until the node is continued, as by SIGSTOP and SIGCONT.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import math
import os
import random
import secrets
import signal
import socket
import time
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from typing import Any, Protocol, TypeVar
from unittest.mock import patch
from weakref import WeakSet

import structlog

from genie import work_time
from genie.client import clock
from genie.client.process import Process, use_process

T = TypeVar("T")


MAX_BUSY_ITERATIONS = 300_000
"""For how many iterations in a row a callback may be ready, so that the clock does not advance to a timer."""


class Stuck(Exception):
    """No task of the simulation can ever continue, or tasks run for very long without waiting for the clock."""


class Node:
    """A simulated process on a simulated host, created by `SimLoop.create_node`. A restarted process is a new node.

    `clock_offset_s` is how much the wall clock of the node is ahead of the simulated time.
    """

    def __init__(self, name: str, host: str, clock_offset_s: float) -> None:
        self.name = name
        self.host = host
        self.clock_offset_s = clock_offset_s
        self.dead = False
        """True if the process has crashed or ended."""
        self.stopped = False
        """True from `SimLoop.stop_node` to `SimLoop.continue_node`."""
        self.continued_at = -math.inf
        """When the node was last continued after a stop, in virtual time."""
        self.deferred: deque[events.Handle] = deque()
        """Callbacks that became ready while the node was stopped."""
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        """The tasks of the node."""
        self.signals: dict[int, Callable[[], object]] = {}
        """The handler of each signal number."""
        self.context = Context()
        """A context in which `NODE` is this node: tasks and callbacks that are created in it belong to this node."""
        self.context.run(NODE.set, self)

    def __repr__(self) -> str:
        return f"<node {self.name}>"


NODE: ContextVar[Node | None] = ContextVar("NODE", default=None)
"""The node whose callback is running. None outside every node."""


class LoopNetwork(Protocol):
    """The methods of the network (`network.Network`) that the loop calls."""

    async def connect(self, factory: Callable[[], asyncio.Protocol], host: str, port: int) -> Any:
        """Connect to an address."""

    def listen(self, factory: Callable[[], asyncio.Protocol], host: str | None, port: int) -> Any:
        """Accept connections at an address."""

    def on_crash(self, node: Node, *, silently: bool) -> None:
        """End the listeners and connections of a node that was killed."""


class SimLoop(asyncio.BaseEventLoop):
    """An event loop with a virtual clock, on which several nodes run.

    `start_s` is the initial time of the clock. Each iteration of the loop takes `step_s` seconds of virtual time.
    `Network(loop)` sets `network`, which is needed before a connection is made.
    """

    network: LoopNetwork
    _ready: deque[events.Handle]
    _scheduled: list[events.TimerHandle]

    def __init__(self, *, start_s: float = 0.0, step_s: float = 0.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._step_s = step_s
        self._busy_iterations = 0
        """The number of iterations since the clock last advanced to a timer."""
        self._killed_tasks: list[list[asyncio.Task[Any]]] = []
        """The tasks of killed nodes. They stay referenced because garbage collection would run their `finally` blocks."""
        self.finished = False
        """True if `finish` was called."""

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    # -- nodes --------------------------------------------------------------------------------------------

    def create_node(self, name: str, host: str | None = None, *, clock_offset_s: float = 0.0) -> Node:
        """Create a simulated process, by default on a host with the same name as the process."""
        return Node(name, host or name, clock_offset_s)

    def spawn(self, node: Node, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that runs a coroutine as part of a node, and return the task."""
        return self.create_task(coroutine, context=node.context.copy())

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None, **options: Any
    ) -> asyncio.Task[T]:
        """Create a task that belongs to the running node or, with `context`, to the node in that context."""
        task: asyncio.Task[T] = super().create_task(coro, name=name, context=context, **options)
        node = NODE.get() if context is None else context.get(NODE)
        if node is not None:
            node.tasks.add(task)
        return task

    def kill(self, node: Node, *, silently: bool = False) -> None:
        """Crash a process: its callbacks never run again, and its connections end.

        With `silently` the whole machine loses power. Its peers then detect the crash only by TCP keepalive.
        """
        node.dead = True
        node.deferred.clear()
        self._killed_tasks.append(list(node.tasks))
        self.network.on_crash(node, silently=silently)

    def stop_node(self, node: Node) -> None:
        """Simulate SIGSTOP: until `continue_node` no callback of the node runs, while time passes for all others."""
        node.stopped = True

    def continue_node(self, node: Node) -> None:
        """Simulate SIGCONT: all callbacks that were deferred while the node was stopped become ready now."""
        node.stopped = False
        node.continued_at = self.time()
        self._ready.extend(node.deferred)
        node.deferred.clear()

    def send_signal(self, node: Node, number: signal.Signals) -> bool:
        """Schedule the handler that a node has for a signal. Return False if the node has no handler."""
        handler = node.signals.get(number)
        if handler is not None:
            self.call_soon(handler, context=node.context)
        return handler is not None

    # -- one iteration ------------------------------------------------------------------------------------

    def _run_once(self) -> None:  # noqa: C901 - the hot path
        """Run one iteration of the loop: advance the clock, then run all callbacks that are ready.

        The method of asyncio, which this one replaces, would wait in real time. Callbacks of dead nodes are dropped,
        and callbacks of stopped nodes are deferred. Raises Stuck if nothing can ever happen again, or if the clock does
        not advance to a timer for MAX_BUSY_ITERATIONS iterations.
        """
        ready, timers = self._ready, self._scheduled
        self._now_s += self._step_s
        self._busy_iterations += 1
        if not ready:
            self._busy_iterations = 0
            while timers and timers[0].cancelled():
                heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
            if not timers:
                if self._stopping:  # type: ignore[attr-defined]
                    return
                raise Stuck("no callback is ready and no timer is set")
            self._now_s = max(self._now_s, timers[0].when())
        elif self._busy_iterations > MAX_BUSY_ITERATIONS:
            raise Stuck(
                f"tasks have run for {MAX_BUSY_ITERATIONS:,} iterations without waiting: the clock stands still"
            )
        now = self._now_s
        while timers and timers[0].when() <= now:
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            node = handle._context.get(NODE)  # type: ignore[attr-defined]
            if node is not None and (node.dead or node.stopped):
                if not node.dead:
                    node.deferred.append(handle)
                continue
            handle._run()
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """Do nothing: `_run_once` skips a cancelled timer when the timer is due."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread schedules callbacks, so the loop needs no wake-up."""

    def _process_events(self, event_list: object) -> None:
        """Do nothing: the loop polls no sockets."""

    # -- the end ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Discard all tasks and timers without warnings, and close the loop."""
        events._set_running_loop(self)  # `finally` blocks of the closed tasks may need a running loop
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about coroutines that never started
                self._drop_all()
        finally:
            events._set_running_loop(None)
        self.close()

    def _drop_all(self) -> None:
        """Close the coroutines of all tasks, including those of killed nodes, and clear the queues of callbacks."""
        self.finished = True
        self.set_exception_handler(lambda _loop, _context: None)
        tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
        tasks += [task for killed in self._killed_tasks for task in killed if not task.done()]
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())
        self._ready.clear()
        self._scheduled.clear()
        self._killed_tasks.clear()

    def _check_closed(self) -> None:
        """Accept calls after `finish`, because coroutines that are being closed may still schedule callbacks."""
        if not self.finished:
            super()._check_closed()  # type: ignore[misc]

    # -- overrides of asyncio -----------------------------------------------------------------------------

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override] # noqa: ARG002
        """Call the function at once, in this thread: a thread pool would make the order of events nondeterministic."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 - the caller awaits it
            future.set_exception(error)
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Register a handler of the running node for `SimLoop.send_signal`. Real signals are not handled."""
        node = NODE.get()
        if node is not None:
            node.signals[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        """Remove the handler that the running node has for a signal. Return False if the node has none."""
        node = NODE.get()
        return node is not None and node.signals.pop(sig, None) is not None

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Connect in the simulated network. Raises NotImplementedError if TLS is requested."""
        if options.get("ssl"):
            raise NotImplementedError("there is no TLS in the simulated network")
        return await self.network.connect(protocol_factory, str(host), int(port))

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Listen in the simulated network, at the address of the `sock` option if there is one."""
        sock = options.get("sock")
        if sock is not None:
            host, port = sock.getsockname()[:2]
        return self.network.listen(protocol_factory, host, port or 0)

    async def getaddrinfo(self, host: Any, port: Any, **_options: Any) -> Any:
        """Resolve a host name to itself: in the simulated network names are addresses."""
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]


MAX_CLOSE_ATTEMPTS = 10
"""How often the loop tries to close a coroutine, which may await in several `finally` blocks."""


def _close(coroutine: Any) -> None:
    """Close the coroutine of a task, which is None if the task has none."""
    if coroutine is None:
        return
    for _ in range(MAX_CLOSE_ATTEMPTS):
        with suppress(BaseException):  # the coroutine awaits in a `finally` block: close it again
            coroutine.close()
            return


# -- Determinism: wall clocks, random numbers and secrets from the seed, and the logs --------

EPOCH_S = 1_790_000_000
"""The Unix time at which a simulation starts."""


@contextmanager
def deterministic(
    loop: SimLoop, seed: int, on_log: Callable[[str, MutableMapping[str, Any]], bool] | None = None
) -> Iterator[None]:
    """Replace the sources of nondeterminism: in this context, `time` depends on the loop, and `random` and `secrets` on the seed.

    `on_log` is called with the level and the fields of each structlog line, and returns True to drop the line. The warnings of
    clients are dropped. Blocking sockets and the clients of `genie.sync` raise RuntimeError, because they are not simulated.
    Automatic garbage collection is disabled, because it would finalize objects at times that depend on the machine.
    """

    def wall_clock() -> float:
        node = NODE.get()
        return EPOCH_S + loop.time() + (0.0 if node is None else node.clock_offset_s)

    secret_random = random.Random(seed)

    def random_bytes(size: int | None = None) -> bytes:
        return secret_random.randbytes(32 if size is None else size)  # 32 is the default of `secrets.token_bytes`

    def filter_log(_logger: object, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if on_log is not None and on_log(level, line):
            raise structlog.DropEvent
        return line

    log_config, random_state, gc_was_enabled = structlog.get_config(), random.getstate(), gc.isenabled()
    with (
        patch.multiple(time, time=wall_clock, time_ns=lambda: round(wall_clock() * 1e9), monotonic=loop.time),
        patch.object(clock, "now", loop.time),
        patch.object(work_time, "now", loop.time),
        patch.object(os, "urandom", random_bytes),  # for `uuid.uuid4`
        patch.object(random, "_urandom", random_bytes),  # for `random.SystemRandom`, and so for most of `secrets`
        patch.object(secrets, "token_bytes", random_bytes),
        patch.object(socket, "create_connection", _reject_blocking_socket),
        # The default note has the process and the host, which differ from run to run.
        use_process(Process(default_note=str, new_event_loop=_reject_blocking_socket)),
        # Many worlds leave locks held on purpose, and would fill the terminal with warnings.
        patch.object(logging.getLogger("genie.client"), "disabled", new=True),
    ):
        random.seed(seed)
        if on_log is not None:
            structlog.configure(processors=[filter_log, *log_config["processors"]], cache_logger_on_first_use=False)
        gc.disable()
        try:
            yield
        finally:
            structlog.configure(**log_config)
            random.setstate(random_state)
            if gc_was_enabled:
                gc.enable()


def _reject_blocking_socket(*_: object, **__: object) -> Any:
    """Raise RuntimeError. Replaces functions that would create a blocking socket."""
    raise RuntimeError(
        "blocking sockets are not simulated: use genie.connect() in genie.testing.run(), or genie.testing.server()"
    )
