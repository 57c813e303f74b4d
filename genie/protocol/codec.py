"""JSON encoding and decoding without types. No other module of the protocol imports orjson."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

Fragment = orjson.Fragment
"""A part of a message that is already encoded as JSON."""
EncodeError = orjson.JSONEncodeError
_MALFORMED = "JSON is malformed: "

LONG_BYTES = 32 << 10
"""Bytes of a line above which its numbers are not decoded to explain its error: msgspec takes 7 µs for a number that is
nearly 0."""

_skip = msgspec.json.Decoder(msgspec.Raw).decode
"""Reads JSON without decoding its values."""


def loads(line: bytes) -> Any:
    """Decode JSON. Raises ValueError if it is not strict JSON: NaN, invalid UTF-8 and lone surrogates are invalid."""
    return orjson.loads(line)


def malformed_reason(error: Exception) -> str | None:
    """Return the text of an error of msgspec for malformed JSON, with the position. Return None for other errors."""
    reason = str(error)
    return reason.removeprefix(_MALFORMED) if reason.startswith(_MALFORMED) else None


def explain_malformed(line: bytes, error: ValueError) -> str:
    """Return why a line is not strict JSON, after `loads` has rejected it with `error`.

    If possible, return the text of msgspec, as for a line that a typed decoder rejects.
    """
    try:
        if len(line) > LONG_BYTES:
            _skip(line)
        else:
            msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as found:
        return malformed_reason(found) or str(error)
    return str(error)


def dumps(value: Any) -> bytes:
    """Encode a value as JSON. Raises EncodeError if it is nested deeper than 254 levels."""
    return orjson.dumps(value)


def message(command: str, payload: dict[str, Any]) -> bytes:
    """Encode a message as a line, with its line end."""
    return orjson.dumps({"command": command, "payload": payload}, option=orjson.OPT_APPEND_NEWLINE)
