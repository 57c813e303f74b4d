"""Tools for tests of services that use Genie, and of Genie itself. The server never imports this package.

- `run` runs a coroutine with a Genie server, a virtual clock and a network in memory: an hour passes in milliseconds.
- `assert_lock_order` fails if the tests locked names in orders that can deadlock.
- `server` runs a Genie server in the running event loop, on a free port.

`python -m genie.testing.simulation.soak` simulates clusters of servers, clients and Redis under faults; see `README.md`.
"""

from __future__ import annotations

from genie.testing.lock_order import assert_lock_order, set_lock_order_rules
from genie.testing.server import run, server
from genie.testing.simulation.loop import Stuck

__all__ = ["Stuck", "assert_lock_order", "run", "server", "set_lock_order_rules"]
