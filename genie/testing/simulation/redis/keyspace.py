"""What a simulated Redis keeps, and the way back: every write can be undone, as when a machine dies before its disk."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from genie.testing.simulation.redis.resp import Failure

REMEMBERED = 2_000
"""Writes that can be undone."""

Undo = tuple[bytes, bytes | None, Any]
"""A key, a field of it (or None for the key itself), and what was there (None where nothing was)."""


class Keys:
    """Keys to hashes, sets and streams. Each call of `end_write` closes a group that is lost together or not at all."""

    def __init__(self) -> None:
        self._keys: dict[bytes, Any] = {}
        self._group: list[Undo] = []
        self._groups: deque[list[Undo]] = deque(maxlen=REMEMBERED)

    # -- reading ------------------------------------------------------------------------------------------

    def hash(self, key: bytes) -> dict[bytes, bytes]:
        """A hash, empty where there is none. Not to be changed."""
        return cast("dict[bytes, bytes]", self._typed(key, dict))

    def set(self, key: bytes) -> dict[bytes, None]:
        """A set, as the keys of a dict."""
        return cast("dict[bytes, None]", self._typed(key, Members))

    def stream(self, key: bytes) -> Stream | None:
        """A stream, if there is one."""
        value = self._keys.get(key)
        if value is not None and not isinstance(value, Stream):
            raise Failure("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Any:
        return iter(self._keys)

    def _typed(self, key: bytes, kind: type) -> Any:
        value = self._keys.get(key)
        if value is None:
            return {}
        if type(value) is not kind:
            raise Failure("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    # -- writing ------------------------------------------------------------------------------------------

    def put(self, key: bytes, field: bytes, value: bytes | None, kind: type = dict) -> bool:
        """Set a field of a hash, or a member of a set; whether it is new."""
        there = self._typed(key, kind)
        if not there and key not in self._keys:
            there = self._keys[key] = kind()
        new = field not in there
        self._group.append((key, field, None if new else (there[field],)))
        there[field] = value
        return new

    def drop(self, key: bytes, field: bytes) -> bool:
        """Remove a field or a member; whether it was there. An empty key goes."""
        there = self._keys.get(key)
        if there is None or field not in there:
            return False
        self._group.append((key, field, (there[field],)))
        del there[field]
        if not there:
            self._group.append((key, None, there))
            del self._keys[key]
        return True

    def delete(self, key: bytes) -> bool:
        """Remove a key; whether it was there."""
        there = self._keys.pop(key, None)
        if there is not None:
            self._group.append((key, None, there))
        return there is not None

    def create(self, key: bytes, value: Any) -> None:
        """Set a key that is not there."""
        self._group.append((key, None, None))
        self._keys[key] = value

    def note(self, key: bytes, undo: Any) -> None:
        """Remember a function that undoes what was done to a key's value."""
        self._group.append((key, None, undo))

    @property
    def written(self) -> int:
        """How much the command that is being carried out has written."""
        return len(self._group)

    # -- losing -------------------------------------------------------------------------------------------

    def end_write(self) -> list[Undo]:
        """A command is over. Returns what it has written, as what was there before."""
        written, self._group = self._group, []
        if written:
            self._groups.append(written)
        return written

    def lose(self, writes: int) -> int:
        """Undo the last so many writes; returns how many there were to undo."""
        lost = 0
        while lost < writes and self._groups:
            for key, field, before in reversed(self._groups.pop()):
                self._undo(key, field, before)
            lost += 1
        return lost

    def clear(self) -> None:
        """Lose everything."""
        self._keys.clear()
        self._groups.clear()
        self._group = []

    def _undo(self, key: bytes, field: bytes | None, before: Any) -> None:
        if field is None:
            if callable(before):
                before()
            elif before is None:
                del self._keys[key]
            else:
                self._keys[key] = before
        elif before is None:
            there = self._keys[key]
            del there[field]
            if not there:
                del self._keys[key]
        else:
            self._keys[key][field] = before[0]


class Members(dict[bytes, None]):
    """A set, in the order in which its members came."""


class Stream:
    """Entries by id, in order."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[int, int], list[bytes]]] = []
        self.last = (0, 0)

    def undo(self, last: tuple[int, int], gone: list[tuple[tuple[int, int], list[bytes]]]) -> None:
        """Take the last entry back, and put back what was cut off with it."""
        self.entries.pop()
        self.entries[:0] = gone
        self.last = last
