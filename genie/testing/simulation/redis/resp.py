"""RESP, the wire of Redis, from the side of the server: commands in, replies out."""

from __future__ import annotations


class Status(bytes):
    """A reply such as OK."""


class Failure(Exception):
    """An error reply: its text begins with a code."""


class Reader:
    """Bytes to commands."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The commands that these bytes complete."""
        self._data += data
        commands: list[list[bytes]] = []
        place = 0
        while True:
            found = self._one(place)
            if found is None:
                break
            command, place = found
            commands.append(command)
        self._data = self._data[place:]
        return commands

    def _one(self, place: int) -> tuple[list[bytes], int] | None:
        data = self._data
        end = data.find(b"\r\n", place)
        if end < 0:
            return None
        parts: list[bytes] = []
        count, place = int(data[place + 1 : end]), end + 2
        for _ in range(count):
            end = data.find(b"\r\n", place)
            if end < 0:
                return None
            start = end + 2
            place = start + int(data[place + 1 : end]) + 2
            if place > len(data):
                return None
            parts.append(data[start : place - 2])
        return parts, place


def encode(reply: object, version: int = 2) -> bytes:
    """A reply: bytes, an integer, None, a list, a dict, a set, a `Status` or a `Failure`."""
    if reply is None:
        return b"_\r\n" if version > 2 else b"$-1\r\n"
    if isinstance(reply, Status):
        return b"+%b\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, Failure):
        return b"-%b\r\n" % str(reply).encode()
    if isinstance(reply, dict):
        flat = [part for item in reply.items() for part in item]
        head = b"%%%d\r\n" % len(reply) if version > 2 else b"*%d\r\n" % len(flat)
    elif isinstance(reply, set):
        flat = sorted(reply)
        head = b"~%d\r\n" % len(flat) if version > 2 else b"*%d\r\n" % len(flat)
    else:
        flat = list(reply)  # type: ignore[call-overload]
        head = b"*%d\r\n" % len(flat)
    return head + b"".join([encode(part, version) for part in flat])


def command(*parts: bytes) -> bytes:
    """A command, or a message of a master to its replicas."""
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])
