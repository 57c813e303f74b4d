"""Whatever else a process asks the machine for, taken from the seed: wall clocks, chance, secrets; and its logs."""

from __future__ import annotations

import gc
import random
import secrets
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from genie.testing.loop import NODE, SimLoop

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
