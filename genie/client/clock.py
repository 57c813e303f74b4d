"""The clock of the clients."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

now: Callable[[], float] = time.monotonic
"""Return the time in seconds, on a monotonic clock. On Linux this clock also runs while the machine is suspended, unlike
`time.monotonic`: otherwise a client would count a lock as held for longer than the server holds it."""
if sys.platform == "linux":
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
