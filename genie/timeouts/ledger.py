"""How a ledger names its tables, columns and states.

The names that we use are those of the document on the timeout handler's data layer ("Design Timeout DAO Layer"). A
ledger of other names says which is which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from genie.timeouts.tables import NAMES, Tables

PROCESSING_STATES = ("RECEIVED_PREPARE", "RESERVED")
"""A transfer in one of these can expire."""

FINAL_STATES = (
    "RECEIVED_FULFIL",
    "COMMITTED",
    "FAILED",
    "EXPIRED",
    "EXPIRED_PREPARED",
    "EXPIRED_RESERVED",
    "REJECTED",
    "ABORTED",
)
"""A transfer in one of these is not waited for any more. (In any other it is neither handed over nor forgotten.)"""


class Ledger:
    """The tables of one ledger, and what its states mean.

    `names` maps a table, or `table.column`, to what this ledger calls it, for those that it calls otherwise:
    `{"transfer": "transfers", "transfer.expirationDate": "expires_at"}`. States are compared as they are written.
    `time_zone` is the IANA name of the zone in which the ledger writes expiration dates, as in "Africa/Nairobi".
    ValueError, where a name is none of ours, a state means two things, or the time zone is unknown.
    """

    def __init__(
        self,
        *,
        names: Mapping[str, str] | None = None,
        processing_states: Iterable[str] = PROCESSING_STATES,
        final_states: Iterable[str] = FINAL_STATES,
        time_zone: str = "UTC",
    ) -> None:
        own = dict(names or {})
        unknown = sorted(set(own) - set(NAMES))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no name of a table or column; those are {', '.join(NAMES)}")
        if not all(own.values()):
            raise ValueError(f"{', '.join(name for name in own if not own[name])}: a name can't be empty")
        _check_distinct(own)
        self.tables = Tables(own, _zone(time_zone))
        self.processing_states = _states("processing_states", processing_states)
        self.final_states = _states("final_states", final_states)
        both = sorted(set(self.processing_states) & set(self.final_states))
        if both:
            raise ValueError(f"{', '.join(both)}: a state is final or in processing, not both")


def _check_distinct(own: Mapping[str, str]) -> None:
    """No two tables, and no two columns of one, may have the same name."""
    found: dict[tuple[str, str], str] = {}
    for name in NAMES:
        table, _, column = name.partition(".")
        place = (table if column else "", own.get(name, column or table))
        if place in found:
            raise ValueError(f"{found[place]} and {name} can't both be called {place[1]!r}")
        found[place] = name


def _zone(name: str) -> ZoneInfo | None:
    """None for UTC, which needs no conversion."""
    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"time_zone: {name!r} is no time zone; one is named as in the IANA database: UTC, Europe/Berlin, Etc/GMT-3"
        ) from None
    return None if name == "UTC" else zone


def _states(field: str, states: Iterable[str]) -> tuple[str, ...]:
    found = (states,) if isinstance(states, str) else tuple(states)
    if not found or not all(isinstance(state, str) and state for state in found):
        raise ValueError(f"{field}: one or more names of states are needed, not {states!r}")
    return found
