"""RESP, the protocol of Redis, as a server uses it: parse commands, and encode replies."""

from __future__ import annotations


class Status(bytes):
    """A simple string reply, such as OK."""


class Failure(Exception):
    """An error reply. The text begins with a code, e.g. `ERR` or `NOSCRIPT`."""


class CommandParser:
    """Splits a stream of bytes into commands. Each command is a list of its name and arguments."""

    def __init__(self) -> None:
        self._data = b""
        """The received bytes of a command that is not complete yet."""

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Return the commands that are complete with `data`. The rest is kept for the next call."""
        self._data += data
        commands: list[list[bytes]] = []
        position = 0
        while True:
            parsed = self._parse_one(position)
            if parsed is None:
                break
            command, position = parsed
            commands.append(command)
        self._data = self._data[position:]
        return commands

    def _parse_one(self, position: int) -> tuple[list[bytes], int] | None:
        """Parse the command that starts at a position.

        Returns the command and the position after the command, or None if the command is incomplete.
        """
        data = self._data
        end = data.find(b"\r\n", position)
        if end < 0:
            return None
        parts: list[bytes] = []
        count, position = int(data[position + 1 : end]), end + 2
        for _ in range(count):
            end = data.find(b"\r\n", position)
            if end < 0:
                return None
            start = end + 2
            position = start + int(data[position + 1 : end]) + 2
            if position > len(data):
                return None
            parts.append(data[start : position - 2])
        return parts, position


def encode(reply: object, version: int = 2) -> bytes:
    """Encode a reply in RESP 2 or RESP 3.

    A reply is bytes, an integer, None, a list, a tuple, a dict, a set, a `Status` or a `Failure`. RESP 2 has neither dicts
    nor sets, and represents both as lists.
    """
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
        flat = sorted(reply)  # the order must be deterministic
        head = b"~%d\r\n" % len(flat) if version > 2 else b"*%d\r\n" % len(flat)
    else:
        flat = list(reply)  # type: ignore[call-overload]
        head = b"*%d\r\n" % len(flat)
    return head + b"".join([encode(part, version) for part in flat])


def encode_command(*parts: bytes) -> bytes:
    """Encode a command, which consists of a name and arguments."""
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])
