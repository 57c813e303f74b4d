"""For tests of services that use Genie, and of Genie itself. Shipped, never imported by the server.

- `run` runs a coroutine with a server beside it, a virtual clock and a network in memory: an hour passes in no time.
- `server` is a server in the running event loop, on a free port.

The rest simulates whole worlds of servers, clients and a Redis that fail, each from a seed:
`python -m genie.testing.simulation.soak`.
"""

from __future__ import annotations

from genie.testing.server import run, server
from genie.testing.simulation.loop import Stuck

__all__ = ["Stuck", "run", "server"]
