"""The clock with which the server measures and limits its own work.

It is not the clock of the event loop, because uvloop reads that only once per iteration. This module is not compiled, so a
test can replace `now` before it creates a server: then commands take no time, or as long as the test says.
"""

from __future__ import annotations

import time

now = time.monotonic
"""Return the time in seconds."""
