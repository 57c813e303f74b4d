"""The keys of a simulated Redis. Writes can be undone, which simulates a crash before they reached the disk."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from genie.testing.simulation.redis.resp import Failure

MAX_UNDO_WRITES = 2_000
"""The maximum number of recent writes that can be undone."""

Undo = tuple[bytes, bytes | None, Any]
"""One change: the key, the field (None if the key itself was changed), and the former value, as for `Keyspace._undo`."""


class Keyspace:
    """The keys of a Redis, which are hashes, sets and streams.

    All changes until `end_write` form one atomic write, which is lost as a whole or not at all.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, Any] = {}
        self._pending_changes: list[Undo] = []
        """The changes since the last call of `end_write`."""
        self._writes: deque[list[Undo]] = deque(maxlen=MAX_UNDO_WRITES)
        """The last atomic writes, oldest first."""

    # -- reading ------------------------------------------------------------------------------------------

    def hash(self, key: bytes) -> dict[bytes, bytes]:
        """Return a hash, which is empty if the key does not exist. The caller must not change the hash."""
        return cast("dict[bytes, bytes]", self._value_of_type(key, dict))

    def set(self, key: bytes) -> dict[bytes, None]:
        """Return the members of a set as the keys of a dict, which is empty if the key does not exist."""
        return cast("dict[bytes, None]", self._value_of_type(key, Members))

    def stream(self, key: bytes) -> Stream | None:
        """Return a stream, or None if the key does not exist."""
        value = self._keys.get(key)
        if value is not None and not isinstance(value, Stream):
            raise Failure("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Any:
        return iter(self._keys)

    def _value_of_type(self, key: bytes, kind: type) -> Any:
        """Return the value of a key, or an empty value if the key does not exist.

        Raises Failure if the type differs.
        """
        value = self._keys.get(key)
        if value is None:
            return {}
        if type(value) is not kind:
            raise Failure("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    # -- writing ------------------------------------------------------------------------------------------

    def set_field(self, key: bytes, field: bytes, value: bytes | None, kind: type = dict) -> bool:
        """Set a field of a hash, or add a member to a set (`kind` is `Members`). Return whether the field is new.

        The key is created if necessary.
        """
        values = self._value_of_type(key, kind)
        if not values and key not in self._keys:
            values = self._keys[key] = kind()
        is_new = field not in values
        self._pending_changes.append((key, field, None if is_new else (values[field],)))
        values[field] = value
        return is_new

    def remove_field(self, key: bytes, field: bytes) -> bool:
        """Remove a field of a hash or a member of a set. Return whether it existed.

        A key that becomes empty is removed, too.
        """
        values = self._keys.get(key)
        if values is None or field not in values:
            return False
        self._pending_changes.append((key, field, (values[field],)))
        del values[field]
        if not values:
            self._pending_changes.append((key, None, values))
            del self._keys[key]
        return True

    def delete(self, key: bytes) -> bool:
        """Remove a key. Return whether it existed."""
        values = self._keys.pop(key, None)
        if values is not None:
            self._pending_changes.append((key, None, values))
        return values is not None

    def create(self, key: bytes, value: Any) -> None:
        """Add a key that does not exist yet."""
        self._pending_changes.append((key, None, None))
        self._keys[key] = value

    def record_undo(self, key: bytes, undo: Any) -> None:
        """Record a change that the caller makes to the value of a key. The function `undo` undoes the change."""
        self._pending_changes.append((key, None, undo))

    @property
    def pending_change_count(self) -> int:
        """The number of changes since the last call of `end_write`."""
        return len(self._pending_changes)

    # -- undoing -----------------------------------------------------------------------------------------

    def end_write(self) -> list[Undo]:
        """End an atomic write, and return how to undo each of its changes. The list is empty if nothing was changed."""
        undo, self._pending_changes = self._pending_changes, []
        if undo:
            self._writes.append(undo)
        return undo

    def undo_last_writes(self, count: int) -> int:
        """Undo the last `count` writes, or all recorded writes if there are fewer. Return how many were undone."""
        undone_count = 0
        while undone_count < count and self._writes:
            for key, field, before in reversed(self._writes.pop()):
                self._undo(key, field, before)
            undone_count += 1
        return undone_count

    def clear(self) -> None:
        """Remove all keys. The removal can't be undone."""
        self._keys.clear()
        self._writes.clear()
        self._pending_changes = []

    def _undo(self, key: bytes, field: bytes | None, before: Any) -> None:
        """Undo one change of a key, or of a field if `field` is not None.

        For a key, `before` is the former value, None if the key did not exist, or a function that undoes the change.
        For a field, `before` is a 1-tuple of the former value, or None if the field did not exist.
        """
        if field is not None:
            self._undo_field(key, field, before)
        elif callable(before):
            before()
        elif before is None:
            del self._keys[key]
        else:
            self._keys[key] = before

    def _undo_field(self, key: bytes, field: bytes, before: tuple[Any] | None) -> None:
        """Undo one change of a field."""
        values = self._keys[key]
        if before is not None:
            (values[field],) = before
            return
        del values[field]
        if not values:
            del self._keys[key]


class Members(dict[bytes, None]):
    """A set whose members are kept in insertion order, as the keys of a dict."""


class Stream:
    """A stream."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[int, int], list[bytes]]] = []
        """The id of each entry, and its alternating fields and values, in the order of the ids."""
        self.last = (0, 0)
        """The greatest id that was ever added."""

    def undo(self, last: tuple[int, int], trimmed: list[tuple[tuple[int, int], list[bytes]]]) -> None:
        """Undo the addition of the last entry: restore the former last id and the entries that were trimmed."""
        self.entries.pop()
        self.entries[:0] = trimmed
        self.last = last
