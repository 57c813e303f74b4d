"""Load profiles of `genie bench --profile`: phases of load as applications cause it, described in TOML.

`genie.bench.runner` measures how fast a server is. A profile instead uses the public client with hold times, arrival
rates, queue timeouts and contention, and counts what the application would notice.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from random import choices, expovariate, randrange, shuffle, uniform
from typing import Any, Final

from genie.bench.histogram import Histogram
from genie.client import aio
from genie.errors import Deadlock, GenieError, QueueTimeout

MAX_CONCURRENT_CONNECTS: Final = 64
MAX_UNFINISHED_PER_CONNECTION: Final = 100
"""Maximum number of unfinished transactions for each connection. Beyond it, arrivals are dropped and counted."""
ERROR_PAUSE_S: Final = 0.1
"""Pause of a closed-loop connection after an error, so that an unavailable server does not cause a busy loop."""
MAX_PHASES: Final = 100

BUILT_IN: Final = {
    "steady": """
        [[phase]]
        name = "steady"
        rate = 200
        hold_ms = 5
        resources = 1000
        shared_percent = 50
    """,
    "burst": """
        [[phase]]
        name = "before"
        seconds = 5
        rate = 100
        [[phase]]
        name = "burst"
        seconds = 5
        rate = 1000
        [[phase]]
        name = "after"
        seconds = 5
        rate = 100
    """,
    "hot-key": """
        [[phase]]
        name = "hot-key"
        resources = 100
        skew = 1.5
        shared_percent = 20
        priorities = 3
        queue_timeout_s = 1
    """,
    "saga": """
        [[phase]]
        name = "saga"
        resources = 50
        locks = 3
        one_by_one = true
        hold_ms = 5
        queue_timeout_s = 2
    """,
}
"""The profiles that are part of Genie, as TOML, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A time of constant load. The fields are the keys of a `[[phase]]` in a profile."""

    name: str
    seconds: float = field(default=10, metadata={"min": 0.1, "max": 86_400})
    connections: int = field(default=16, metadata={"min": 1, "max": 1_000})
    rate: float = field(default=0, metadata={"min": 0, "max": 100_000})
    """Transactions that arrive per second, at random times. With 0 (closed loop), each connection executes one after
    the other."""
    resources: int = field(default=100, metadata={"min": 1, "max": 1_000_000})
    skew: float = field(default=0, metadata={"min": 0, "max": 5})
    """Exponent of the Zipf distribution by which resources are chosen. With 0, all have the same probability."""
    shared_percent: float = field(default=0, metadata={"min": 0, "max": 100})
    locks: int = field(default=1, metadata={"min": 1, "max": 100})
    """Number of resources that a transaction locks."""
    one_by_one: bool = False
    """True if a transaction locks each resource by a request of its own, in random order, so that deadlocks are
    possible."""
    hold_ms: float = field(default=1, metadata={"min": 0, "max": 60_000})
    """Time between the last grant and the release."""
    priorities: int = field(default=1, metadata={"min": 1, "max": 100})
    """Each transaction has a random priority from 0 to `priorities - 1`."""
    queue_timeout_s: float = field(default=5, metadata={"min": 0.001, "max": 3_600})


def load(name_or_path: str) -> list[Phase]:
    """Return the phases of a built-in profile or of a TOML file.

    Raises ValueError if there is no such file, or if its content is not a profile. The message names the invalid key.
    """
    text = BUILT_IN.get(name_or_path)
    if text is None:
        try:
            text = Path(name_or_path).read_bytes().decode()
        except OSError as error:
            names = ", ".join(BUILT_IN)
            raise ValueError(
                f"{name_or_path}: can't be read: {error.strerror or error} (built-in profiles: {names})"
            ) from None
        except UnicodeDecodeError:
            raise ValueError(f"{name_or_path}: must be text in UTF-8") from None
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name_or_path}: {error}") from None


def parse(text: str) -> list[Phase]:
    """Return the phases of a profile in TOML. Raises ValueError; the message names the invalid key."""
    document = tomllib.loads(text)
    _reject_unknown(document, ["phase"], "")
    phases = document.get("phase")
    if not isinstance(phases, list) or not 1 <= len(phases) <= MAX_PHASES:
        raise ValueError(f"needs 1 to {MAX_PHASES} tables [[phase]]")
    return [_parse_phase(keys, number) for number, keys in enumerate(phases, 1)]


def _parse_phase(keys: Any, number: int) -> Phase:
    """Check the keys and values of the `[[phase]]` table with this number, and return its phase. Raises ValueError."""
    where = f"phase {number}: "
    if not isinstance(keys, dict):
        raise ValueError(f"{where}must be a table")  # noqa: TRY004 - errors of a profile are ValueErrors
    _reject_unknown(keys, [key.name for key in fields(Phase)], where)
    for key in fields(Phase):
        if key.name in keys:
            _check_value(key.name, keys[key.name], key.type, key.metadata, where)
    phase = Phase(**{"name": f"phase {number}", **keys})
    if phase.locks > phase.resources:
        raise ValueError(f"{where}locks must be at most resources ({phase.resources}), not {phase.locks}")
    return phase


def _check_value(name: str, value: Any, type_name: Any, bounds: Any, where: str) -> None:
    """Raise ValueError if a value does not have the type of its field, or is out of the field's bounds.

    `type_name` is `str`, `bool`, `int` or `float`. `bounds` has the keys `min` and `max` for a number. `where` begins
    the message.
    """
    if type_name == "str":
        if not isinstance(value, str):
            raise ValueError(f"{where}{name} must be a text, not {value!r}")
        return
    if type_name == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{where}{name} must be true or false, not {value!r}")
        return
    is_number = isinstance(value, int) or (type_name == "float" and isinstance(value, float))
    if isinstance(value, bool) or not is_number or not bounds["min"] <= value <= bounds["max"]:  # a bool is an int
        number = "a whole number" if type_name == "int" else "a number"
        raise ValueError(f"{where}{name} must be {number} from {bounds['min']} to {bounds['max']}, not {value!r}")


def _reject_unknown(keys: Iterable[str], known: list[str], where: str) -> None:
    """Raise ValueError for the first key that is not known. `where` begins the message."""
    for key in keys:
        if key not in known:
            raise ValueError(f"{where}unknown key {key!r}; known: {', '.join(known)}")


@dataclass(slots=True)
class PhaseResult:
    """The measurements of one phase."""

    phase: Phase
    measured_s: float = 0
    to_locked: Histogram = field(default_factory=Histogram)
    """Durations from the arrival of a transaction to the grant of its last lock."""
    completed: int = 0
    """Number of transactions that have released all their locks."""
    timeouts: int = 0
    """Number of transactions that ended with a queue timeout."""
    deadlocks: int = 0
    """Number of transactions that ended as the victim of a deadlock."""
    unfinished: int = 0
    """Number of transactions that waited or held locks at the end of the phase."""
    dropped: int = 0
    """Number of arrivals that were not started, because too many transactions were unfinished."""
    errors: Counter[str] = field(default_factory=Counter)
    """Number of other errors by the name of the exception."""

    @property
    def per_s(self) -> float:
        """Completed transactions per second."""
        return self.completed / self.measured_s if self.measured_s else 0.0


async def run_phase(phase: Phase, connect: Callable[[], aio.Client]) -> PhaseResult:
    """Run a phase with new connections, and release all locks at its end.

    Raises GenieError if a connection cannot be opened.
    """
    clients = [connect() for _ in range(phase.connections)]
    opened: list[aio.Client] = []
    try:
        for start in range(0, len(clients), MAX_CONCURRENT_CONNECTS):
            group = clients[start : start + MAX_CONCURRENT_CONNECTS]
            opened += group
            await asyncio.gather(*(client.__aenter__() for client in group))
        return await _Load(phase, clients).run()
    finally:
        await asyncio.gather(*(client.close() for client in opened), return_exceptions=True)


class _Load:
    """The load of one phase."""

    def __init__(self, phase: Phase, clients: list[aio.Client]) -> None:
        self._phase = phase
        self._clients = clients
        self._result = PhaseResult(phase)
        self._prefix = f"genie-bench/{secrets.token_hex(8)}/"
        self._indexes = range(phase.resources)
        self._weights = list(accumulate((index + 1) ** -phase.skew for index in self._indexes))
        """Cumulative weights with which `_draw` chooses resources: the first more often, the higher the skew."""
        self._tasks: set[asyncio.Task[bool]] = set()

    async def run(self) -> PhaseResult:
        """Run the load for the duration of the phase."""
        phase, result = self._phase, self._result
        started = time.monotonic()
        try:
            async with asyncio.timeout(phase.seconds):
                if phase.rate:
                    await self._arrive()
                else:  # each client starts a transaction when its last one has ended
                    await asyncio.gather(*map(self._loop, self._clients))
        except TimeoutError:  # the phase is over
            pass
        finally:
            result.measured_s = time.monotonic() - started
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return result

    async def _loop(self, client: aio.Client) -> None:
        """Execute transactions one after the other."""
        while True:
            if not await self._transact(client, time.monotonic_ns()):
                await asyncio.sleep(ERROR_PAUSE_S)

    async def _arrive(self) -> None:
        """Start transactions at random times, until this coroutine is cancelled.

        If a transaction is started late, its durations begin at the time at which it was due.
        """
        due_at_s = time.monotonic()
        started_count = 0
        while True:
            due_at_s += expovariate(self._phase.rate)
            await asyncio.sleep(max(0.0, due_at_s - time.monotonic()))
            if len(self._tasks) >= len(self._clients) * MAX_UNFINISHED_PER_CONNECTION:
                self._result.dropped += 1
                continue
            client = self._clients[started_count % len(self._clients)]
            started_count += 1
            task = asyncio.create_task(self._transact(client, int(due_at_s * 1e9)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _transact(self, client: aio.Client, arrived_ns: int) -> bool:
        """Execute a transaction that arrived at `arrived_ns` (monotonic clock), and count its outcome.

        Return False after an error other than a queue timeout or a deadlock.
        """
        phase, result = self._phase, self._result
        resources = self._choose()
        requests = [[resource] for resource in resources] if phase.one_by_one else [resources]
        options: dict[str, Any] = {
            "transaction": secrets.token_hex(8) if phase.one_by_one else None,
            "queue_timeout": phase.queue_timeout_s,
            "transaction_timeout": phase.hold_ms / 1000 + phase.queue_timeout_s * len(requests) + 10,
            "priority": randrange(phase.priorities),  # noqa: S311 - a load is no secret
            "on_disconnect": "release",
        }
        held: list[aio.Lock] = []
        try:
            try:
                for request in requests:
                    lock = await client.acquire(*request, **options)
                    held.append(lock)
                result.to_locked.add(max(0, time.monotonic_ns() - arrived_ns))
                await asyncio.sleep(phase.hold_ms / 1000)
            finally:
                await asyncio.gather(*(lock.release() for lock in held))
            result.completed += 1
        except QueueTimeout:
            result.timeouts += 1
        except Deadlock:
            result.deadlocks += 1
        except GenieError as error:
            result.errors[type(error).__name__] += 1
            return False
        except asyncio.CancelledError:
            result.unfinished += 1
            raise
        return True

    def _choose(self) -> list[str]:
        """Return the resources of a transaction, such as `shared:NAME`, without duplicates and in random order."""
        phase = self._phase
        chosen = set(self._draw(phase.locks))
        for _ in range(phase.locks * 20):
            if len(chosen) == phase.locks:
                break
            chosen.update(self._draw(1))
        else:  # with a high skew, new resources are hardly drawn: add the resources with the highest probability
            for index in self._indexes:
                if len(chosen) == phase.locks:
                    break
                chosen.add(index)
        mode = "shared" if uniform(0, 100) < phase.shared_percent else "exclusive"  # noqa: S311 - a load is no secret
        resources = [f"{mode}:{self._prefix}{index}" for index in chosen]
        shuffle(resources)
        return resources

    def _draw(self, count: int) -> list[int]:
        """Return the indexes of `count` resources, drawn by the skew of the phase. An index may occur several times."""
        return choices(self._indexes, cum_weights=self._weights, k=count)  # noqa: S311 - a load is no secret
