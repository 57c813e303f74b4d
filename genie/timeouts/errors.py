"""What can go wrong with a ledger and its timeouts. Each is one line."""

from __future__ import annotations

from genie.errors import GenieError


class DatabaseFailed(GenieError):
    """The database could not be reached, went away, or refused something. Nothing was half done; run again later."""


class WrongDate(GenieError):
    """A date of the ledger that can't be read."""


class RunSuperseded(GenieError):
    """Another run was at it meanwhile, so this one has changed nothing."""
