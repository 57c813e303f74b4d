"""How long the admin port keeps the locks waiting while it is polled: with 100,000 locks held and as many requests that wait.

    python benchmarks/admin.py [PART ...] [--json]

The table says what was measured, the goal, and whether it is met; see `scale.py`. What is measured is the processor time
of the longest turn of the event loop in a second, the median of three: what comes once, and not each time that somebody
asks, is in the notes, and so is the time by the clock, which wants a quiet machine.
"""

from __future__ import annotations

import sys

from admin_parts.polled import many_lines, one_line
from scale_parts.table import run

if __name__ == "__main__":
    sys.exit(run("How long the admin port keeps the locks waiting.", one_line, many_lines))
