"""Mutates lines: their bytes, or the JSON in them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

WORDS = (
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"0.1e1", b"9007199254740992", b"-9007199254740993"),
    *(b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"1" * 400, b"2147483648", b"1e-9"),
    *(b'""', b'"\\ud800"', b'"\\u0000"', b'"\\u00a0"', b'"\x7f"', b"[]", b"{}", b'"' + b"x" * 513 + b'"'),
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\x00", b",", b":", b"}", b"]", b'"', b"\\"),
    *(b'"note":', b'"quiet":', b'"protocol":', b'"client":', b'"1"', b'"007"'),
    *(b'"id":', b'"ref":', b'"payload":', b'"command":', b'"resources":', b'"anyOf":', b'"weights":', b'"target":'),
)
"""Bytes that are inserted into a line."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 1e300, 2**53, -(2**53), 2**63 - 1, 2**63, 2**64, 2**31 + 1, 1e-9, -0.0),
    *(float("nan"), float("inf"), "", "a", "exclusive:a", "shared:", "x" * 129, "x" * 513, "\n", "\x7f", "\ud800"),
    *([], {}, [[]], [None], ["exclusive:a", 1], {"id": 1}, [1, 2], [0.5, -1], ["exclusive:a", "exclusive:a"]),
)
"""Replacements of a JSON value."""

DEEP = [b"[" * depth + b"]" * depth for depth in (15, 16, 17, 254, 255, 1023, 1025)]


def mutate(random: Random, line: bytes) -> bytes:
    """Return a line with a random change, which usually makes it invalid."""
    choice = random.random()
    if choice < 0.7:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict):
            return _mutate_json(random, message, duplicate=choice < 0.08)
    return _mutate_bytes(random, line)


def _mutate_json(random: Random, message: dict[str, Any], *, duplicate: bool) -> bytes:
    """Delete, add or replace a field of a message or of its payload; `duplicate`: give it twice."""
    payload = message.get("payload")
    target = message if not isinstance(payload, dict) or not payload or random.random() < 0.2 else payload
    names = list(target)
    if not names:
        return json.dumps(message).encode()
    name, choice = random.choice(names), random.random()
    if duplicate:
        text = json.dumps(message, separators=(",", ":"))
        key = f'"{name}":'
        return text.replace(key, f"{key}{json.dumps(random.choice(VALUES))},{key}", 1).encode()
    if choice < 0.15:
        del target[name]
    elif choice < 0.3:
        target[random.choice(("ref", "id", "other", "priority", "target", "payload", "note", "quiet", "notes"))] = (
            random.choice(VALUES)
        )
    elif choice < 0.45 and isinstance(target[name], list) and target[name]:
        target[name][random.randrange(len(target[name]))] = random.choice(VALUES)
    elif choice < 0.5:
        return json.dumps(message).encode().replace(b"null", random.choice(DEEP), 1)
    else:
        target[name] = random.choice(VALUES)
    return json.dumps(message, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")


def _mutate_bytes(random: Random, line: bytes) -> bytes:  # noqa: PLR0911 - one for each kind of mutation
    """Insert, replace, delete, repeat or truncate bytes at a random position."""
    position, choice = random.randrange(len(line) + 1), random.random()
    if choice < 0.3:
        return line[:position] + random.choice(WORDS) + line[position:]
    if choice < 0.5:
        return line[:position] + random.choice(WORDS) + line[position + random.randrange(1, 12) :]
    if choice < 0.65:
        return line[:position]
    if choice < 0.75:
        return line[:position] + line[position + random.randrange(1, 6) :]
    if choice < 0.85:
        return line[:position] + bytes([random.randrange(256)]) + line[position + 1 :]
    if choice < 0.9:
        return line[:position] + random.choice(DEEP) + line[position:]
    if choice < 0.95:
        return line + line[position:]
    return random.randbytes(random.randrange(40))
