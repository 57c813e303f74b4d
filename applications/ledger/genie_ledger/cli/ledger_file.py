"""The section `[ledger]` of the configuration file: the names, the states and the time zone of a ledger.

    [ledger]
    processing_states = ["pending"]
    final_states = ["paid", "refused"]
    time_zone = "Africa/Nairobi"

    [ledger.transfer]
    table = "payments"
    transferId = "id"

Each section `[ledger.TABLE]` maps a table of the reference design: `table` is its name in this ledger, and each other key is a
column of the reference design with its name in this ledger. A key that is left out has its default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from genie.cli.toolkit import ConfigurationError, read_document
from genie_ledger import Ledger
from genie_ledger.ledger import NAMES

LEDGER = "ledger"
"""The section of the file. The lock server, which may have the same file, ignores it."""
LISTS = ("processing_states", "final_states")
TIME_ZONE = "time_zone"
TABLE = "table"
"""Key with the name of a table. No column of the reference design has this name."""

KEYS = {
    table: (TABLE, *(name.partition(".")[2] for name in NAMES if name.startswith(f"{table}.")))
    for table in NAMES
    if "." not in table
}
"""The keys of each section `[ledger.TABLE]`, by table."""


def read_ledger(path: str) -> Ledger:
    """Return the ledger that a file describes. Raises ConfigurationError with all errors of its section `[ledger]`, or if
    the file has no such section.
    """
    section = read_document(path).get(LEDGER)
    if not isinstance(section, dict):
        raise ConfigurationError([f"{path}: has no section [{LEDGER}], which describes the ledger"])
    errors = [f"{path}: {error}" for error in _find_errors(section)]
    if errors:
        raise ConfigurationError(errors)
    names = {
        table if key == TABLE else f"{table}.{key}": name
        for table in KEYS
        for key, name in section.get(table, {}).items()
    }
    options = {key: section[key] for key in (*LISTS, TIME_ZONE) if key in section}
    try:
        return Ledger(names=names, **options)
    except ValueError as error:
        raise ConfigurationError([f"{path}: [{LEDGER}]: {error}"]) from None


def _find_errors(section: dict[str, Any]) -> Iterator[str]:
    """Describe each unknown key, and each value of a wrong type."""
    for key, value in section.items():
        if key in KEYS:
            yield from _find_table_errors(key, value)
        elif key in LISTS:
            if not isinstance(value, list) or not all(isinstance(state, str) for state in value):
                yield f'{LEDGER}.{key}: must be an array of states, such as ["RESERVED"], not {value!r}'
        elif key != TIME_ZONE:
            yield _unknown(key, (*KEYS, *LISTS, TIME_ZONE))
        elif not isinstance(value, str):
            yield f"{LEDGER}.{key}: must be a string, not {value!r}"


def _find_table_errors(table: str, section: Any) -> Iterator[str]:
    """Describe the errors of a section `[ledger.TABLE]`."""
    if not isinstance(section, dict):
        yield f"{LEDGER}.{table}: must be a section, [{LEDGER}.{table}]"
        return
    for key, name in section.items():
        if key not in KEYS[table]:
            yield _unknown(f"{table}.{key}", [f"{table}.{known}" for known in KEYS[table]])
        elif not isinstance(name, str):
            yield f"{LEDGER}.{table}.{key}: must be a string, not {name!r}"


def _unknown(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f"{LEDGER}.{key}: unknown key" + (f"; did you mean {LEDGER}.{near[0]}?" if near else "")
