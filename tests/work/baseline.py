"""Counts the work of all shapes and scenarios, and compares it with `tests/baselines/work.toml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from support.processes.servers import Redis

TESTS: Final = Path(__file__).parents[1]
FILE: Final = TESTS / "baselines" / "work.toml"

SHAPES: Final = ("one connection", "64 connections", "64 x 16", "hot key", "units", "hot units", "beside a subtree")
"""The shapes of `lockstep.py`, which can only be imported by a process of its own: it replaces the clock."""
STORES: Final = ("memory", "redis")
CLIENTS: Final = {"one task": 1, "64 tasks": 64}
"""Loads of the asyncio client, with their number of tasks."""

TOLERANCES: Final = {
    "opcodes": 0.01,  # exact, but a change of a few instructions needs no new baseline
    "allocations": 0.02,  # exact, too; but releases of msgspec, orjson and hiredis allocate differently
    "redis_bytes": 0.03,  # times and random names; the time of a request has up to five digits more or less
    "reads": 0.0,
    "writes": 0.0,
    "polls": 0.0,
    "redis_commands": 0.0,
}
"""By which share of the baseline a count may differ from it, in both directions."""

OF_THE_INTERPRETER: Final = {"opcodes", "allocations"}
"""Counts that depend on the version of Python, and are compared only with that of the baseline."""

HEAD = """\
# The work of a server for one cycle: a request, `queued`, `locked`, a release and `released`. Written by `make baseline`
# with the version of Python below, and compared by tests/unit/server/test_work.py. Commit a new baseline together with
# the change that causes it, and say in the commit message why.
#
# opcodes         executed bytecode instructions, without the event loop's
# allocations     blocks of Python's allocator (tests/work/opcodes.py)
# reads, writes   system calls on sockets: to clients and to Redis
# polls           waits for input (epoll_wait)
# redis_commands  commands that Redis executes, including those of scripts
# redis_bytes     bytes sent to Redis
#
# The section `client` is about the asyncio client: its opcodes, without the event loop's, and its writes.
"""


def python_version() -> str:
    """Return the version on which counts of the interpreter depend."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def count_shape(shape: str, redis: Redis | None) -> dict[str, float]:
    """Count the work of one shape in a new process. A Redis serves each shape once."""
    arguments: list[str] = []
    if redis is not None:
        namespace = shape.replace(" ", "-")
        redis.create_namespace(namespace)
        arguments = [str(redis.port), namespace]
    return _run("work.lockstep", shape, *arguments)


def count_client(tasks: int) -> dict[str, float]:
    """Count the work of the asyncio client in a new process."""
    return _run("work.client", str(tasks))


def _run(module: str, *arguments: str) -> dict[str, float]:
    """Run a module that prints its counts."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GENIE_", "PYTHON"))}
    # A fixed seed of hashes: the order of a set may decide how many instructions a search takes.
    environment |= {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=120).stdout
    return {name: round(value, 4) for name, value in json.loads(output).items()}


def count_core() -> dict[str, float]:
    """Count the instructions of the lock manager's scenarios in a new process: pytest rewrites the assertions in its own."""
    return _run("work.core_scenarios")


def read() -> dict[str, Any]:
    """Return the baseline."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def write(core: Mapping[str, float], shapes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Write a baseline: the scenarios of the lock manager, and the shapes of each store and of the client."""
    lines = [HEAD, f'python = "{python_version()}"']
    for store, by_shape in shapes.items():
        for shape, counts in by_shape.items():
            lines += ["", f'[{store}."{shape}"]', *_assignments(counts)]
    lines += ["", "# Opcodes of the lock manager (tests/work/core_scenarios.py)", "[core]", *_assignments(core)]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _assignments(counts: Mapping[str, float]) -> list[str]:
    return [f"{name} = {value:g}" if value < 100_000 else f"{name} = {value}" for name, value in counts.items()]


def differences(counts: Mapping[str, float], recorded: Mapping[str, float], recorded_python: str) -> list[str]:
    """Describe each count that is outside of its tolerance. Names without a tolerance are counts of opcodes."""
    found = []
    for name in counts.keys() | recorded.keys():
        kind = name if name in TOLERANCES else "opcodes"
        if kind in OF_THE_INTERPRETER and recorded_python != python_version():
            continue
        now, before = counts.get(name), recorded.get(name)
        if now is None or before is None:
            found.append(f"{name}: {now}, baseline {before}")
        elif abs(now - before) > TOLERANCES[kind] * before + 1e-4:
            change = f"{(now / before - 1) * 100:+.1f} %, " if before else ""
            found.append(f"{name}: {now:g}, baseline {before:g} ({change}tolerance {TOLERANCES[kind]:.0%})")
    return sorted(found)


def verdict(subject: str, found: Sequence[str]) -> str:
    """Return the message of a failed comparison."""
    advice = (
        "More work makes the server slower: avoid it, or say in the commit message what it buys. If the change is "
        "intended, or the work has become less, run `make baseline` and commit tests/baselines/work.toml."
    )
    return "\n  ".join([f"The work of a cycle has changed: {subject}", *found, advice])
