"""An event loop whose clock is virtual: nobody sleeps, and a day passes as soon as there is nothing else to do.

It runs what is ready in the order in which it became so. When nothing is, it goes on to the next timer: its time is then
that timer's. Connections are made in a simulated network (`network.py`).

Everything that runs belongs to a *node*, a simulated process, or to none. A node can be killed (nothing of it runs any
more), stopped (what is due waits, as after SIGSTOP) and continued.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import secrets
import signal
import time
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import structlog

if TYPE_CHECKING:
    from genie.testing.simulation.network import Network

T = TypeVar("T")


class Stuck(Exception):
    """Nothing is ready, no timer is set and nothing is under way: what is waited for can't come."""


class Node:
    """A simulated process on a simulated host. Made by `SimLoop.node`; one that was killed does not come back.

    `wall_s` is what its wall clock shows beyond that of the world.
    """

    def __init__(self, name: str, host: str, wall_s: float) -> None:
        self.name = name
        self.host = host
        self.wall_s = wall_s
        self.dead = False
        self.stopped = False
        self.parked: deque[events.Handle] = deque()
        """What became ready while it was stopped."""
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.signals: dict[int, Callable[[], object]] = {}
        self.context = Context()
        self.context.run(NODE.set, self)

    def __repr__(self) -> str:
        return f"<node {self.name}>"


NODE: ContextVar[Node | None] = ContextVar("NODE", default=None)
"""The node that is running."""


class SimLoop(asyncio.BaseEventLoop):
    """The loop. `start_s` is its time at the beginning, `step_s` what one round of ready callbacks takes.

    `network` must be set before anything connects.
    """

    network: Network
    _ready: deque[events.Handle]
    _scheduled: list[events.TimerHandle]

    def __init__(self, *, start_s: float = 0.0, step_s: float = 0.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._step_s = step_s
        self._graveyard: list[list[asyncio.Task[Any]]] = []
        """Tasks of killed nodes. Were they collected, their `finally` blocks would run."""
        self.ended = False

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    # -- nodes --------------------------------------------------------------------------------------------

    def node(self, name: str, host: str | None = None, *, wall_s: float = 0.0) -> Node:
        """A new process, by default on a host of its own name."""
        return Node(name, host or name, wall_s)

    def spawn(self, node: Node, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in a node."""
        return self.create_task(coroutine, context=node.context.copy())

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None, **options: Any
    ) -> asyncio.Task[T]:
        """A task of the node that is running, or of the one that the context says."""
        task: asyncio.Task[T] = super().create_task(coro, name=name, context=context, **options)
        node = NODE.get() if context is None else context.get(NODE)
        if node is not None:
            node.tasks.add(task)
        return task

    def kill(self, node: Node, *, silently: bool = False) -> None:
        """End a process: nothing of it runs any more, and its connections end.

        `silently`, its whole machine has vanished, and who talks to it learns of that late.
        """
        node.dead = True
        node.parked.clear()
        self._graveyard.append(list(node.tasks))
        self.network.bury(node, silently=silently)

    def stop_node(self, node: Node) -> None:
        """SIGSTOP: time goes on, and nothing of this node runs before `continue_node`."""
        node.stopped = True

    def continue_node(self, node: Node) -> None:
        """SIGCONT: all that became due meanwhile is ready at once."""
        node.stopped = False
        self._ready.extend(node.parked)
        node.parked.clear()

    def signal(self, node: Node, number: signal.Signals) -> bool:
        """Send a signal; whether the node handles it."""
        handler = node.signals.get(number)
        if handler is not None:
            self.call_soon(handler, context=node.context)
        return handler is not None

    # -- the round ----------------------------------------------------------------------------------------

    def _run_once(self) -> None:  # noqa: C901 - everything comes through here
        ready, timers = self._ready, self._scheduled
        self._now_s += self._step_s
        if not ready:
            while timers and timers[0].cancelled():
                heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
            if not timers:
                if self._stopping:  # type: ignore[attr-defined]
                    return
                raise Stuck("nothing is ready, and nothing ever will be")
            self._now_s = max(self._now_s, timers[0].when())
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
                    node.parked.append(handle)
                continue
            handle._run()
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """Nothing: one that is cancelled goes when its time comes."""

    def _write_to_self(self) -> None:
        """Nothing: no other thread is waited for."""

    def _process_events(self, event_list: object) -> None:
        """Nothing: there are no sockets."""

    # -- the end ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Drop all that still runs or waits, without a word, and close."""
        events._set_running_loop(self)  # what ends now may ask for it
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some have never begun
                self._drop_all()
        finally:
            events._set_running_loop(None)
        self.close()

    def _drop_all(self) -> None:
        self.ended = True
        self.set_exception_handler(lambda _loop, _context: None)
        tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
        for task in [*tasks, *[task for grave in self._graveyard for task in grave if not task.done()]]:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            for _ in range(10 if coroutine is not None else 0):
                try:
                    coroutine.close()
                    break
                except BaseException:  # noqa: BLE001, S112 - it awaits something as it goes, and is asked again
                    continue
        self._ready.clear()
        self._scheduled.clear()
        self._graveyard.clear()

    def _check_closed(self) -> None:
        if not self.ended:
            super()._check_closed()  # type: ignore[misc]

    # -- what asyncio asks of a loop ----------------------------------------------------------------------

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override] # noqa: ARG002
        """Call it here and now: a thread would make the order of things depend on the machine."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for it
            future.set_exception(error)
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """For `signal`; the process itself gets none."""
        node = NODE.get()
        if node is not None:
            node.signals[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        """Undo it."""
        node = NODE.get()
        return node is not None and node.signals.pop(sig, None) is not None

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Connect in the simulated network."""
        if options.get("ssl"):
            raise NotImplementedError("there is no TLS in the simulated network")
        return await self.network.connect(protocol_factory, str(host), int(port))

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Listen in the simulated network."""
        sock = options.get("sock")
        if sock is not None:
            host, port = sock.getsockname()[:2]
        return self.network.listen(protocol_factory, host, port or 0)

    async def getaddrinfo(self, host: Any, port: Any, **_options: Any) -> Any:
        """Every name is an address there."""
        return [(2, 1, 6, "", (host, port))]


# -- Whatever else a process asks the machine for, taken from the seed: wall clocks, chance, secrets; and its logs --------

EPOCH_S = 1_790_000_000
"""The wall time at which a simulated world begins."""


@contextmanager
def deterministic(
    loop: SimLoop, seed: int, on_log: Callable[[str, MutableMapping[str, Any]], bool] | None = None
) -> Iterator[None]:
    """While this lasts the clocks of `time`, `random` and `secrets` follow the loop and the seed.

    `on_log` gets each line that is logged through structlog, with its level, and says whether that is the end of it.
    """

    def wall() -> float:
        node = NODE.get()
        return EPOCH_S + loop.time() + (0.0 if node is None else node.wall_s)

    chance = random.Random(seed)

    def log(_logger: object, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if on_log is not None and on_log(level, line):
            raise structlog.DropEvent
        return line

    before = time.time, time.time_ns, time.monotonic, secrets.token_bytes, structlog.get_config()
    collecting = gc.collect, gc.freeze, gc.set_threshold
    state, collects = random.getstate(), gc.isenabled()
    time.time = wall
    time.time_ns = lambda: round(wall() * 1e9)
    time.monotonic = loop.time
    secrets.token_bytes = lambda nbytes=None: chance.randbytes(32 if nbytes is None else nbytes)
    random.seed(seed)
    if on_log is not None:
        structlog.configure(processors=[log, *structlog.get_config()["processors"]], cache_logger_on_first_use=False)
    gc.collect = lambda *_generation: 0
    gc.freeze = gc.set_threshold = lambda *_thresholds: None  # type: ignore[assignment]
    gc.disable()  # it would end what was dropped at times that depend on the machine
    try:
        yield
    finally:
        time.time, time.time_ns, time.monotonic, secrets.token_bytes, config = before
        gc.collect, gc.freeze, gc.set_threshold = collecting
        structlog.configure(**config)
        random.setstate(state)
        if collects:
            gc.enable()
