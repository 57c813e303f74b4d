"""The errors of ledgers and their timeouts. Each message is one line."""

from __future__ import annotations

from genie import GenieError


class DatabaseFailed(GenieError):
    """The database could not be reached, closed the connection, or rejected a statement. Nothing
    was changed. A later run can succeed.
    """


class WrongDate(GenieError):
    """A date of the ledger can't be parsed."""


class RunSuperseded(GenieError):
    """Another run has written since this run began, so this run has changed nothing."""
