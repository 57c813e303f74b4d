"""How fast tokens are selected: in the memory of one process, by its threads, and by replicas that lock them in Genie.

    PYTHONPATH=benchmarks python applications/tokens/benchmarks/tokens.py [PART ...] [--json]

The table shows each measurement, its goal, and whether it is met; see `scale.py`. Ratios are medians over alternating
rounds. Rates are absolute, and need a quiet machine.
"""

from __future__ import annotations

import sys

from scale_parts.table import run
from tokens_parts.in_memory import in_memory
from tokens_parts.replicas import replicas
from tokens_parts.threads import threads

if __name__ == "__main__":
    sys.exit(run("How fast tokens are selected.", in_memory, threads, replicas))
