"""Ledgers to try a handler with: transfers by chance, dates that are moved, states that become final.

After the queries and the program that the document "Design Timeout DAO Layer" was tried with. For ledgers that nobody
else needs.
"""

from __future__ import annotations

from genie.timeouts.trial.finalize import finalize
from genie.timeouts.trial.generate import generate
from genie.timeouts.trial.shift import shift
from genie.timeouts.trial.transfers import DataSet

__all__ = ["DataSet", "finalize", "generate", "shift"]
