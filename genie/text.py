"""Texts of clients in logs, terminals and pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

INVISIBLE_RANGES: Final = (
    (0x034F, 0x034F),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x2800, 0x2800),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFFA0, 0xFFA0),
    (0xE0100, 0xE01EF),
)
"""The first and last code points of characters that are invisible, although Python counts them as printable: the characters
with the property `Default_Ignorable_Code_Point` (DerivedCoreProperties.txt of Unicode 15.1), and U+2800, the empty pattern
of Braille."""

MAX_KEPT_ESCAPES: Final = 4_096
"""Maximum number of characters in the cache of escaped characters."""

_INVISIBLE: Final = re.compile(f"[{''.join(f'{chr(first)}-{chr(last)}' for first, last in INVISIBLE_RANGES)}]")


def is_printable(text: str) -> bool:
    """Return whether a text has neither non-printable nor invisible characters."""
    return text.isprintable() and (text.isascii() or _INVISIBLE.search(text) is None)


def printable(text: str) -> str:
    """Escape characters that could move the cursor of a terminal, change the writing direction, or are invisible.

    So no name looks like another name. Variation selectors are escaped too, such as U+FE0F after an emoji.
    """
    if is_printable(text):
        return text
    return text.translate(_escapes)


def printable_json(encoded: bytes) -> bytes:
    r"""Escape the characters that `printable` escapes in a JSON document, as `\uXXXX`. The value of the document is unchanged.

    JSON requires an escape only for the ASCII control characters, and encoders write the others as they are. The document
    must have no line breaks or other spaces than ` ` between its tokens.
    """
    text = encoded.decode()
    if is_printable(text):
        return encoded
    return text.translate(_json_escapes).encode()


class _Escapes(dict[int, str]):
    """The replacement of each character for `str.translate`.

    The last replacements are cached, because a client may send long texts of the same characters.
    """

    def __init__(self, escape: Callable[[str], str]) -> None:
        super().__init__()
        self._escape = escape

    def __missing__(self, code: int) -> str:
        if len(self) >= MAX_KEPT_ESCAPES:  # so that the dict does not grow with each character that occurs
            self.clear()
        char = chr(code)
        escaped = self[code] = char if is_printable(char) else self._escape(char)
        return escaped


_escapes: Final = _Escapes(lambda char: char.encode("unicode_escape").decode())
_json_escapes: Final = _Escapes(lambda char: json.dumps(char)[1:-1])
