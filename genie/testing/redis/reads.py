"""Reading streams: ids, entries, and XREAD."""

from __future__ import annotations

from typing import Any

from genie.testing.redis.keys import Keys


class Read:
    """An XREAD: which streams, behind which ids, how many entries, and how long it waits for them."""

    def __init__(self, keys: Keys, command: list[bytes]) -> None:
        self._keys = keys
        self.count: int | None = None
        self.block_ms: int | None = None
        place = 1
        while command[place].upper() != b"STREAMS":
            if command[place].upper() == b"COUNT":
                self.count = int(command[place + 1])
            elif command[place].upper() == b"BLOCK":
                self.block_ms = int(command[place + 1])
            place += 2
        names = command[place + 1 :]
        half = len(names) // 2
        self.after: dict[bytes, tuple[int, int]] = {}
        for key, id_ in zip(names[:half], names[half:], strict=True):
            if id_ == b"$":
                stream = keys.stream(key)
                self.after[key] = (0, 0) if stream is None else stream.last
            else:
                self.after[key] = stream_id(id_, 0)

    def found(self) -> dict[bytes, list[Any]] | None:
        """What is behind the ids by now, or None."""
        found: dict[bytes, list[Any]] = {}
        for key, after in self.after.items():
            stream = self._keys.stream(key)
            entries = [] if stream is None else [entry_of(entry) for entry in stream.entries if entry[0] > after]
            if entries:
                found[key] = entries[: self.count]
        return found or None


def stream_id(text: bytes, rest: int) -> tuple[int, int]:
    """An id as it is written; `rest` is its second part where that is not said."""
    if text == b"-":
        return 0, 0
    if text == b"+":
        return 1 << 63, 1 << 63
    exclusive = text.startswith(b"(")
    first, dash, second = text.removeprefix(b"(").partition(b"-")
    return int(first), (int(second) if dash else rest) + exclusive


def entry_of(entry: tuple[tuple[int, int], list[bytes]]) -> list[Any]:
    """An entry as it is told."""
    return [b"%d-%d" % entry[0], entry[1]]
