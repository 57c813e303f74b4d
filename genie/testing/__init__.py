"""Tools for tests of services that use Genie. The server never imports this package.

- `run` runs a coroutine with a Genie server, a virtual clock and a network in memory: an hour passes in milliseconds.
- `assert_lock_order` fails if the tests locked names in orders that can deadlock.
- `explore` runs a service in many simulated worlds with faults, and simplifies the faults of the first failure. The service can
  call `process` and `note`.
- `server` runs a Genie server in the running event loop, on a free port.

The search for defects of Genie itself uses the same virtual clock, network and Redis, and is not in this package.
"""

from __future__ import annotations

try:
    import structlog  # noqa: F401 - stands for all packages of a server
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "genie.testing needs the packages of a server: pip install 'genie-lock[testing]'", name=error.name
    ) from None

from genie.testing.explore import Violation, explore
from genie.testing.faults import Fault, Kind, random_faults
from genie.testing.lock_order import assert_lock_order, set_lock_order_rules
from genie.testing.server import run, server
from genie.testing.simulation.loop import Stuck
from genie.testing.world import note, process

__all__ = [
    "Fault",
    "Kind",
    "Stuck",
    "Violation",
    "assert_lock_order",
    "explore",
    "note",
    "process",
    "random_faults",
    "run",
    "server",
    "set_lock_order_rules",
]
