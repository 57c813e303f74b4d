"""Texts of clients in logs, terminals and pages."""

from __future__ import annotations

import json


def printable(text: str) -> str:
    """Escape non-printable characters, which could move the cursor or change the writing direction of a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_json(encoded: bytes) -> bytes:
    r"""Escape non-printable characters of a JSON document as `\uXXXX`. The document has the same value as before.

    JSON requires an escape only for the ASCII control characters, and encoders write the others as they are. The document
    must have no line breaks or other spaces than ` ` between its tokens.
    """
    text = encoded.decode()
    if text.isprintable():
        return encoded
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text).encode()
