"""How long polling of the admin port delays the locks, with 100,000 locks held and 100,000 requests waiting.

    python benchmarks/admin.py [PART ...] [--json]

The table shows each measurement, its goal, and whether it is met; see `scale.py`. Measured is the CPU time of the longest
iteration of the event loop in a second, as the median of three. The notes show what occurs once and not at each request,
and the wall-clock time, which needs a quiet machine.
"""

from __future__ import annotations

import sys

from admin_parts.polled import many_lines, one_line
from scale_parts.table import run

if __name__ == "__main__":
    sys.exit(run("How long the admin port keeps the locks waiting.", one_line, many_lines))
