"""Find the transfers of a ledger whose time has passed, soon and without reading everything:
`TimeoutHandler`.
"""

from __future__ import annotations

from genie.sql.schema_check import WrongSchema
from genie_ledger.errors import DatabaseFailed, RunSuperseded, WrongDate
from genie_ledger.handler import TimeoutHandler, TimeoutRun
from genie_ledger.ledger import FINAL_STATES, PROCESSING_STATES, Ledger
from genie_ledger.plan import ExpiredTransfer

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
