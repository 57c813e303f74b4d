"""Small damage: to the bytes of a line, and to the JSON in it."""

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
"""What is put into a line."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 1e300, 2**53, -(2**53), 2**63 - 1, 2**63, 2**64, 2**31 + 1, 1e-9, -0.0),
    *(float("nan"), float("inf"), "", "a", "exclusive:a", "shared:", "x" * 129, "x" * 513, "\n", "\x7f", "\ud800"),
    *([], {}, [[]], [None], ["exclusive:a", 1], {"id": 1}, [1, 2], [0.5, -1], ["exclusive:a", "exclusive:a"]),
)
"""What is put in place of a value."""

DEEP = [b"[" * depth + b"]" * depth for depth in (15, 16, 17, 200, 1100)]


def damaged(random: Random, line: bytes) -> bytes:
    """A line with something wrong with it, mostly."""
    how = random.random()
    if how < 0.7:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if isinstance(said, dict):
            return _other_values(random, said, doubled=how < 0.08)
    return _other_bytes(random, line)


def _other_values(random: Random, said: dict[str, Any], *, doubled: bool) -> bytes:
    inner = said.get("payload")
    outer = said if not isinstance(inner, dict) or not inner or random.random() < 0.2 else inner
    names = list(outer)
    if not names:
        return json.dumps(said).encode()
    name, choice = random.choice(names), random.random()
    if doubled:
        text = json.dumps(said, separators=(",", ":"))
        key = f'"{name}":'
        return text.replace(key, f"{key}{json.dumps(random.choice(VALUES))},{key}", 1).encode()
    if choice < 0.15:
        del outer[name]
    elif choice < 0.3:
        outer[random.choice(("ref", "id", "other", "priority", "target", "payload", "note", "quiet", "notes"))] = (
            random.choice(VALUES)
        )
    elif choice < 0.45 and isinstance(outer[name], list) and outer[name]:
        outer[name][random.randrange(len(outer[name]))] = random.choice(VALUES)
    elif choice < 0.5:
        return json.dumps(said).encode().replace(b"null", random.choice(DEEP), 1)
    else:
        outer[name] = random.choice(VALUES)
    return json.dumps(said, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")


def _other_bytes(random: Random, line: bytes) -> bytes:  # noqa: PLR0911 - one for each kind of damage
    place, how = random.randrange(len(line) + 1), random.random()
    if how < 0.3:
        return line[:place] + random.choice(WORDS) + line[place:]
    if how < 0.5:
        return line[:place] + random.choice(WORDS) + line[place + random.randrange(1, 12) :]
    if how < 0.65:
        return line[:place]
    if how < 0.75:
        return line[:place] + line[place + random.randrange(1, 6) :]
    if how < 0.85:
        return line[:place] + bytes([random.randrange(256)]) + line[place + 1 :]
    if how < 0.9:
        return line[:place] + random.choice(DEEP) + line[place:]
    if how < 0.95:
        return line + line[place:]
    return random.randbytes(random.randrange(40))
