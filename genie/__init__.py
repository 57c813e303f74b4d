"""Genie: locks for transactions that span services.

    async with genie.connect("127.0.0.1", 7077) as client:
        async with client.lock("exclusive:accounts/2", "shared:accounts/13", transaction="transfer-42"):
            ...

`genie.sync.connect` has the same API without `await`, for threads. The exceptions are defined in `genie.errors`.
Modules with third-party dependencies are imported on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from genie.errors import (
    Blocker,
    ConnectionLost,
    CycleStep,
    Deadlock,
    Disconnected,
    GenieError,
    Insufficient,
    LockError,
    LockLost,
    QueueTimeout,
    RequestRejected,
    StaleFence,
    TransactionTimeout,
    Unavailable,
)
from genie.protocol.resources import exclusive, shared, subtree, units
from genie.version import VERSION as __version__  # noqa: N811 - the name that tools look for

if TYPE_CHECKING:
    from genie import sync
    from genie.client.aio import Client, Lock, Transaction, connect
    from genie.client.inspection import Holder, Inspection, Waiter
    from genie.client.once import once
    from genie.client.watches import Change


__all__ = [
    "Blocker",
    "Change",
    "Client",
    "ConnectionLost",
    "CycleStep",
    "Deadlock",
    "Disconnected",
    "GenieError",
    "Holder",
    "Inspection",
    "Insufficient",
    "Lock",
    "LockError",
    "LockLost",
    "QueueTimeout",
    "RequestRejected",
    "StaleFence",
    "Transaction",
    "TransactionTimeout",
    "Unavailable",
    "Waiter",
    "__version__",
    "connect",
    "exclusive",
    "once",
    "shared",
    "subtree",
    "sync",
    "units",
]

_MODULE_BY_NAME = {
    "Change": "genie.client.watches",
    "Client": "genie.client.aio",
    "connect": "genie.client.aio",
    "Holder": "genie.client.inspection",
    "Inspection": "genie.client.inspection",
    "Waiter": "genie.client.inspection",
    "Lock": "genie.client.aio",
    "Transaction": "genie.client.aio",
    "once": "genie.client.once",
}
"""The module of each public name that is imported on first access."""


def __getattr__(name: str) -> object:
    """Import a public name on first access, to keep `import genie` fast (PEP 562)."""
    value: object
    if name in _MODULE_BY_NAME:
        value = getattr(import_module(_MODULE_BY_NAME[name]), name)
    elif name in ("sql", "sync"):
        value = import_module(f"genie.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
