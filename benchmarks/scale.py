"""How cost grows: with locks, with waiters, with connections. Each goal is a ratio within one run, or a bound.

    python benchmarks/scale.py [PART ...] [--json]

The table shows each measurement, its goal, and whether it is met. The exit status is 1 if a goal is missed, or if a part
can't be measured on this machine. Ratios are medians over rounds that alternate between both sides, so that noise of the
machine affects both. The rows of timeouts, restart and memory are absolute times and sizes, which need a quiet machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scale_parts.chains import chains
from scale_parts.core import crowd, cycle, handoff, three
from scale_parts.idle import idle
from scale_parts.lock_kinds import kinds
from scale_parts.memory import memory
from scale_parts.restart import restart
from scale_parts.table import run
from scale_parts.timeouts import timeouts

if __name__ == "__main__":
    parts = (cycle, handoff, three, chains, crowd, kinds, timeouts, memory, restart, idle)
    sys.exit(run("How cost grows: ratios and bounds, each with its goal.", *parts))
