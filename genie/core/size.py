"""Upper bounds of the memory that requests take, in bytes, for CPython on 64-bit machines.

Nearly all requests have only short texts. Their memory is computed from their number: `REQUEST_BYTES` for each request, and
`NAME_BYTES` for each name. The texts of all other requests are measured (`excess_bytes`).
"""

from __future__ import annotations

import re
from typing import Final

from genie.core.model import Request

SHORT_TEXT: Final = 128
"""Maximum characters of a short name or note in ASCII. Longer texts, and texts that are not ASCII, are measured."""
SHORT_REF: Final = 64
"""Maximum characters of a `ref` that is short in any script."""

SHORT_NAMES: Final = 8
"""Maximum number of names of a request that is not large. A request with more names is not retained with its reply."""

SHORT_TEXT_BYTES: Final = 208
"""Bytes of a name or a note that are part of `REQUEST_BYTES` and `NAME_BYTES`."""
SHORT_REF_BYTES: Final = 640
"""Bytes of a `ref` that are part of `REQUEST_BYTES`."""

REQUEST_BYTES: Final = 1_024 + 2 * SHORT_TEXT_BYTES + SHORT_REF_BYTES
"""A request that is held or waits, without its names: the object with its numbers, its entries in the tables of requests,
of deadlines and of its session, its transaction's name, its note and its `ref`."""
NAME_BYTES: Final = 256 + SHORT_TEXT_BYTES
"""A name of a request: the text, and the entries in the tables of locks, of the transaction and of a wait queue."""
RESOURCE_BYTES: Final = 896
"""A resource that is waited for or shared: its holders and its wait queue."""
TRANSACTION_BYTES: Final = 768
"""A transaction: the tables of its requests and of its grants."""
FIRST_BLOCKERS_BYTES: Final = 10_240
"""The first blockers of a waiting request with a `traceparent`."""

_is_four_bytes_wide: Final = re.compile("[\U00010000-\U0010ffff]").search
_is_two_bytes_wide: Final = re.compile("[\u0100-\uffff]").search
"""CPython keeps a text with the width of its widest character (PEP 393). `max` takes up to four times as long as a search."""
_ASCII_HEADER_BYTES: Final = 49
_NON_ASCII_HEADER_BYTES: Final = 73
_ALIGNMENT: Final = 16


def text_bytes(text: str) -> int:
    """Return an upper bound of a text's memory: its characters, and the UTF-8 copy that CPython keeps after it was encoded.

    An ASCII text has no copy, because its characters already are its UTF-8.
    """
    if text.isascii():
        return _aligned(_ASCII_HEADER_BYTES + len(text))
    width = 4 if _is_four_bytes_wide(text) else 2 if _is_two_bytes_wide(text) else 1
    utf8_bytes = len(text.encode("utf-8", "surrogatepass")) + 1
    return _aligned(_NON_ASCII_HEADER_BYTES + width * (len(text) + 1)) + _aligned(utf8_bytes)


def text_excess(text: str) -> int:
    """Return how many bytes a name or a note takes beyond those of a short one."""
    return max(0, text_bytes(text) - SHORT_TEXT_BYTES)


def excess_bytes(request: Request) -> int:
    """Return how many bytes the texts of a request take beyond those of a request with short texts."""
    excess = sum(map(text_excess, request.exclusive)) + sum(map(text_excess, request.shared))
    if request.details is not None:
        excess += sum(map(text_excess, request.details.units))
    for text in (request.transaction, request.context.note):
        if text is not None:
            excess += text_excess(text)
    if request.ref is not None:
        excess += max(0, text_bytes(request.ref) - SHORT_REF_BYTES)
    return excess


def charged_names(request: Request) -> int:
    """Return the number of names that a request is charged for: its `details`, if it has some, take as much as one more."""
    return request.name_count() + (request.details is not None)


def is_large(request: Request) -> bool:
    """Return whether a request has many names, a subtree, or texts that are not short."""
    names_subtree = request.details is not None and bool(request.details.subtrees)
    return names_subtree or charged_names(request) > SHORT_NAMES or excess_bytes(request) > 0


def _aligned(size: int) -> int:
    """Return the size of a block of memory: a multiple of 16 bytes, and the header of a large block."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
