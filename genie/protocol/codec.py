"""JSON encoding and decoding. No other module of the protocol imports the JSON library."""

from __future__ import annotations

from typing import Any

import orjson

Fragment = orjson.Fragment
"""A part of a message that is already encoded as JSON."""


def loads(line: bytes) -> Any:
    """Decode JSON. Raises ValueError if it is not strict JSON: NaN, invalid UTF-8 and lone surrogates are invalid."""
    return orjson.loads(line)


def dumps(value: Any) -> bytes:
    """Encode a value as JSON."""
    return orjson.dumps(value)


def message(command: str, payload: dict[str, Any]) -> bytes:
    """Encode a message as a line, with its line end."""
    return orjson.dumps({"command": command, "payload": payload}, option=orjson.OPT_APPEND_NEWLINE)
