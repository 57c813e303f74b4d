"""Names of locks: which parts vary within a class, and which of two names precedes the other."""

from __future__ import annotations

import re
from typing import Any, Final

DIGITS: Final = "0123456789"
# Parts of a name that identify a member of its class: UUIDs, long tokens that contain a digit, and other digits.
_UUID: Final = r"(?<![0-9A-Za-z])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Za-z])"
_TOKEN: Final = r"(?<![0-9A-Za-z])(?=[A-Za-z]*[0-9])(?:[0-9A-Fa-f]{8,}|[0-9A-Za-z]{16,})(?![0-9A-Za-z])"  # noqa: S105
_VARYING: Final = re.compile(f"{_UUID}|{_TOKEN}|[0-9]+")
_NUMBER: Final = re.compile("([0-9]+)")

MAX_COMPARED_NUMBERS: Final = 16
"""Maximum number of numbers of a name, the first ones, that are compared as numbers. A name may have 256 of them."""


def mask(name: str) -> str:
    """Return a name with `*` in place of the parts that vary: `accounts/*` for `accounts/42`."""
    return _VARYING.sub("*", name)


def precedes_by_number(name: str, other: str) -> bool:
    """Return whether a name precedes another one if digits are compared as numbers: `a/9` precedes `a/10`."""
    stem = name.rstrip(DIGITS)
    if stem == other.rstrip(DIGITS):
        # The usual case, without an expression: the names differ only in the number at their end.
        if len(name) == len(other):
            return name < other
        start = len(stem)
        if name[start : start + 1] != "0" and other[start : start + 1] != "0":
            return len(name) < len(other)
    return _number_key(name) < _number_key(other)


def _number_key(name: str) -> tuple[list[Any], str]:
    """Return a sort key that compares the digits of a name as numbers: the texts and numbers of the name, alternating.

    The numbers after the first `MAX_COMPARED_NUMBERS` are part of the last text.
    """
    parts: list[Any] = _NUMBER.split(name, MAX_COMPARED_NUMBERS)
    parts[1::2] = map(int, parts[1::2])
    return parts, name
