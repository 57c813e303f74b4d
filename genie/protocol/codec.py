"""JSON to bytes and back. The one place of the protocol that knows by which library."""

from __future__ import annotations

from typing import Any

import orjson

Fragment = orjson.Fragment
"""A part of a message that is JSON already."""


def loads(line: bytes) -> Any:
    """What a line says, read strictly: no NaN, no invalid UTF-8, no lone surrogates. ValueError where it is wrong."""
    return orjson.loads(line)


def dumps(value: Any) -> bytes:
    """A value as JSON."""
    return orjson.dumps(value)


def message(command: str, payload: dict[str, Any]) -> bytes:
    """A message as a line."""
    return orjson.dumps({"command": command, "payload": payload}, option=orjson.OPT_APPEND_NEWLINE)
