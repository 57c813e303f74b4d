"""RESP, the protocol of Redis, as a server uses it: parse commands, and encode replies."""

from __future__ import annotations


class Status(bytes):
    """A simple string reply, such as OK."""


class Failure(Exception):
    """An error reply. The text begins with a code, such as `ERR` or `NOSCRIPT`."""


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
        header = self._parse_number(position)
        if header is None:
            return None
        part_count, position = header
        parts: list[bytes] = []
        for _ in range(part_count):
            header = self._parse_number(position)
            if header is None:
                return None
            size, start = header
            position = start + size + 2  # after the line end of the part
            if position > len(self._data):
                return None
            parts.append(self._data[start : start + size])
        return parts, position

    def _parse_number(self, position: int) -> tuple[int, int] | None:
        """Parse a line `*NUMBER` or `$NUMBER`.

        Return the number and the position after the line, or None if it is incomplete.
        """
        end = self._data.find(b"\r\n", position)
        if end < 0:
            return None
        return int(self._data[position + 1 : end]), end + 2


def encode(reply: object, version: int = 2) -> bytes:
    """Encode a reply in this version of RESP, 2 or 3.

    A reply is bytes, an integer, None, a list, a tuple, a dict, a set, a `Status` or a `Failure`. RESP 2 has neither
    dicts nor sets, and represents both as lists.
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
        parts = [part for key_and_value in reply.items() for part in key_and_value]
        header = b"%%%d\r\n" % len(reply) if version > 2 else b"*%d\r\n" % len(parts)
    elif isinstance(reply, set):
        parts = sorted(reply)  # the order must be deterministic
        header = b"~%d\r\n" % len(parts) if version > 2 else b"*%d\r\n" % len(parts)
    else:
        parts = list(reply)  # type: ignore[call-overload]
        header = b"*%d\r\n" % len(parts)
    return header + b"".join([encode(part, version) for part in parts])


def encode_command(*parts: bytes) -> bytes:
    """Encode a command, which consists of a name and arguments."""
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])
