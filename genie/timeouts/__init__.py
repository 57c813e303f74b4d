"""Find the transfers of a ledger whose time has passed, soon and without reading everything:
`TimeoutHandler`.
"""

from __future__ import annotations

try:
    import sqlalchemy  # noqa: F401 - the rest needs it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "genie.timeouts needs more packages: pip install 'genie-lock[sql]'", name=error.name
    ) from None

from genie.sql.schema_check import WrongSchema
from genie.timeouts.errors import DatabaseFailed, RunSuperseded, WrongDate
from genie.timeouts.handler import TimeoutHandler, TimeoutRun
from genie.timeouts.ledger import FINAL_STATES, PROCESSING_STATES, Ledger
from genie.timeouts.plan import ExpiredTransfer

__all__ = [
    "FINAL_STATES",
    "PROCESSING_STATES",
    "DatabaseFailed",
    "ExpiredTransfer",
    "Ledger",
    "RunSuperseded",
    "TimeoutHandler",
    "TimeoutRun",
    "WrongDate",
    "WrongSchema",
]
