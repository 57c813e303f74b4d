"""Searches for the most expensive input of a server: `python -m fuzz.costs --seconds 60` (with tests/ on the path).

The sequences of commands that cost the most are kept and mutated: by the work of one iteration of the event loop, by the work
for each byte sent, and by the memory retained for each byte sent. Work is counted in bytecode instructions, so a seed gives the
same search in every run.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import structlog

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import cost_server
from fuzz.cost_server import Costs, play, play_for_memory, play_for_time
from fuzz.cost_steps import Step, make_sequence, mutate

MAX_WORK = 2_500_000
"""Maximum instructions of one iteration, about 50 ms. No part begins after 6 ms, and the last one takes at most about 44 ms: a
command with 1,024 resources, or 10,000 entries of `anyOf`, is the most expensive one."""

MAX_RESIDUAL_BLOCKS = 300 + 512
"""Maximum blocks of memory that may be left after all clients: tables and counters, but nothing for each request or client. The
decoder of msgspec keeps up to 512 short strings."""

MAX_RESIDUAL_BYTES = 4 << 20
"""Maximum bytes that may be left. The tables keep the size that they had with the most requests."""

MAX_SECONDS = 0.1
"""CPU time of one iteration beyond which a sequence is reported, although its instructions are few."""

FRESH = 0.2
"""The share of sequences that are not mutations."""

FOLDER = Path("build/fuzz-costs")

Cell = tuple[str, str]
"""A measure, and the command that caused the costs. Each cell keeps the sequence with the greatest value."""


@dataclass
class Found:
    """The sequence with the greatest value of a cell."""

    value: float
    steps: list[Step]
    durable: bool
    detail: str


@dataclass
class Search:
    """The state of a search: the corpus, and the failures."""

    corpus: dict[Cell, Found] = field(default_factory=dict)
    failures: dict[Cell, Found] = field(default_factory=dict)
    residual: tuple[int, int] = (0, 0)
    played: int = 0

    def offer(self, cell: Cell, found: Found) -> None:
        """Keep a sequence if it has the greatest value of its cell."""
        if cell not in self.corpus or found.value > self.corpus[cell].value:
            self.corpus[cell] = found

    def fail(self, cell: Cell, found: Found) -> None:
        """Record a failure: the one with the fewest steps of each cell."""
        if cell not in self.failures:
            print(f"failure: {cell[0]} {cell[1]}: {found.detail}", flush=True)
        if cell not in self.failures or len(found.steps) < len(self.failures[cell].steps):
            self.failures[cell] = found


def try_sequence(search: Search, steps: list[Step], *, durable: bool, timed: bool) -> None:
    """Play a sequence, keep it if it costs more than others, and record its failures."""
    search.played += 1
    costs = play(steps, durable=durable)
    _record_work(search, costs, steps, durable)
    if costs.aborted or costs.exhausted:
        return  # without the limit of work, it could take minutes
    memory = play_for_memory(steps, durable=durable)
    if not memory.problem:
        _record_memory(search, memory, steps, durable)
    if timed:
        _record_time(search, steps, durable)


def _record_work(search: Search, costs: Costs, steps: list[Step], durable: bool) -> None:
    for label, iteration in costs.iterations.items():
        detail = f"{iteration.work:,.0f} instructions in one iteration, after {iteration.sent:,} bytes"
        found = Found(iteration.work, steps, durable, detail)
        if iteration.work > MAX_WORK:
            search.fail(("work", label), found)
        if not costs.aborted:
            search.offer(("work", label), found)
    if costs.problem:
        search.fail(("problem", costs.problem[:60]), Found(0, steps, durable, costs.problem))
    for label, value in {} if costs.aborted else costs.per_byte.items():
        search.offer(("work for each byte", label), Found(value, steps, durable, f"{value:,.0f} instructions a byte"))


def _record_memory(search: Search, costs: Costs, steps: list[Step], durable: bool) -> None:
    detail = f"{costs.growth:.1f} bytes retained a byte"
    search.offer(("growth", costs.growth_label), Found(costs.growth, steps, durable, detail))
    blocks, size = costs.residual_blocks, costs.residual_bytes
    search.residual = max(search.residual[0], blocks), max(search.residual[1], size)
    if blocks > MAX_RESIDUAL_BLOCKS or size > MAX_RESIDUAL_BYTES:
        detail = f"{blocks:,} blocks and {size:,} bytes left: {costs.residual_lines}"
        search.fail(("residual", "end"), Found(blocks, steps, durable, detail))


def _record_time(search: Search, steps: list[Step], durable: bool) -> None:
    """Measure the CPU time. A long one must be reproduced, because other programs disturb the measurement."""
    times: dict[str, float] = {}
    for _ in range(3):
        again = play_for_time(steps, durable=durable)
        worst = {label: iteration.work for label, iteration in again.iterations.items()}
        times = {label: min(seconds, times.get(label, seconds)) for label, seconds in worst.items()}
        if max(times.values(), default=0.0) < MAX_SECONDS:
            break
    for label, seconds in times.items():
        found = Found(seconds, steps, durable, f"{seconds * 1000:.0f} ms of CPU time in one iteration")
        search.offer(("time", label), found)
        if seconds > MAX_SECONDS:
            search.fail(("time", label), found)


def run(seed: int, sequences: int, seconds: float, *, timed: bool) -> Search:
    """Search until the number of sequences or the time is reached."""
    random, search, started_at = Random(seed), Search(), time.monotonic()
    while search.played < sequences and time.monotonic() - started_at < seconds:
        corpus = list(search.corpus.values())
        if not corpus or random.random() < FRESH:
            steps, durable = make_sequence(random), random.random() < 0.3
        else:
            parent, other = random.choice(corpus), random.choice(corpus)
            steps, durable = mutate(random, parent.steps, other.steps), parent.durable
        try_sequence(search, steps, durable=durable, timed=timed)
        if search.played % 100 == 0:
            print(f"{search.played} sequences, {time.monotonic() - started_at:.0f} s", flush=True)
    return search


def shrink(cell: Cell, found: Found) -> Found:
    """Remove steps of a sequence that exceeds the limit of work, as long as it still does; halve the counts of the rest."""
    for at in reversed(range(len(found.steps))):
        fewer = [found.steps[:at] + found.steps[at + 1 :]]
        if found.steps[at].get("count", 1) > 1:
            halved = found.steps[at] | {"count": found.steps[at]["count"] // 2}
            fewer.append([*found.steps[:at], halved, *found.steps[at + 1 :]])
        for steps in fewer:
            worst = play(steps, durable=found.durable).iterations.get(cell[1])
            if worst is not None and worst.work > MAX_WORK:
                detail = f"{worst.work:,.0f} instructions in one iteration, after {worst.sent:,} bytes"
                found = Found(worst.work, steps, found.durable, detail)
                break
    return found


def report(search: Search) -> None:
    """Print the corpus, greatest values first, and the residual."""
    print(f"costs: {search.played} sequences")
    for measure in dict.fromkeys(measure for measure, _ in search.corpus):
        print(f"\n{measure}:")
        rows = [(label, found) for (kind, label), found in search.corpus.items() if kind == measure]
        for label, found in sorted(rows, key=lambda row: -row[1].value)[:8]:
            print(f"  {label:<14} {found.detail}")
    print(f"\nresidual: at most {search.residual[0]:,} blocks, {search.residual[1]:,} bytes")


def save_failures(search: Search) -> None:
    """Shrink the failures, and write each one to a file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number, (cell, found) in enumerate(search.failures.items()):
        smallest = shrink(cell, found) if cell[0] == "work" else found
        path = FOLDER / f"{cell[0]}-{number}.json"
        path.write_text(json.dumps({"durable": smallest.durable, "steps": smallest.steps}, indent=1) + "\n")
        print(f"\nfailure: {cell[0]} {cell[1]}: {smallest.detail}")
        for step in smallest.steps:
            print(f"  {step}")
        print(f"reproduce: PYTHONPATH=tests python -m fuzz.costs --replay {path}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1 << 62, help="sequences to play (default: unlimited)")
    parser.add_argument("--seconds", type=float, default=3600, help="play no sequence after this time")
    parser.add_argument("--seed", type=int, default=0, help="0: random")
    parser.add_argument(
        "--counts-only", action="store_true", help="do not measure CPU time, so that a seed decides all"
    )
    parser.add_argument("--replay", type=Path, help="play the sequence in this file")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if options.replay is not None:
        saved, search = json.loads(options.replay.read_text()), Search()
        try_sequence(search, saved["steps"], durable=saved["durable"], timed=not options.counts_only)
        report(search)
        return 1 if search.failures else 0
    seed = options.seed or Random().randrange(1, 1 << 31)
    print(f"costs: seed {seed}, {cost_server.INSTRUCTION_S * 1e9:g} ns for each instruction", flush=True)
    search = run(seed, options.sequences, options.seconds, timed=not options.counts_only)
    report(search)
    save_failures(search)
    return 1 if search.failures else 0


if __name__ == "__main__":
    sys.exit(main())
