"""An answer as JSON, in slices: some are of several megabytes."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from genie.admin.answers import Answer
from genie.admin.pace import Pace

PIECE_BYTES = 16 << 10
"""An answer comes in pieces of about so much, each to be sent by itself."""
BYTES_OF_WORK = 256
"""So many bytes are as much work as looking at one row."""

Body = tuple[bytes, ...]
"""An encoded answer, in pieces."""

_encode = msgspec.json.Encoder().encode


def at_once(answer: Answer) -> bytes:
    """A small answer."""
    return _encode(answer)


async def encode(answer: Answer, pace: Pace) -> Body:
    """A large answer, whose lists are written item by item. (No field at its top may be left out by a default.)"""
    pieces: list[bytes] = []
    piece = bytearray(b"{")
    for index, field in enumerate(msgspec.structs.fields(answer)):
        piece += b',"' if index else b'"'
        piece += field.encode_name.encode() + b'":'
        value = getattr(answer, field.name)
        if not isinstance(value, list) or not value or not isinstance(value[0], Struct):
            piece += _encode(value)
            continue
        before = b"["
        for item in value:
            line = _encode(item)
            piece += before
            piece += line
            before = b","
            if len(piece) >= PIECE_BYTES:
                pieces.append(bytes(piece))
                piece.clear()
            await pace.did(1 + len(line) // BYTES_OF_WORK)
        piece += b"]"
    piece += b"}"
    return (*pieces, bytes(piece))
