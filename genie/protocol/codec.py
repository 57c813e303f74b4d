"""JSON encoding and decoding. Only this module of the protocol uses the JSON library."""

from __future__ import annotations

from typing import Any

import orjson

Fragment = orjson.Fragment
"""A part of a message that is already encoded as JSON."""


def loads(line: bytes) -> Any:
    """Decode strict JSON: no NaN, no invalid UTF-8, no lone surrogates. Raises ValueError."""
    return orjson.loads(line)


def dumps(value: Any) -> bytes:
    """Encode a value as JSON."""
    return orjson.dumps(value)


def message(command: str, payload: dict[str, Any]) -> bytes:
    """Encode a message as a line."""
    return orjson.dumps({"command": command, "payload": payload}, option=orjson.OPT_APPEND_NEWLINE)
