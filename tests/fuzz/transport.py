"""A transport without a socket: the client's bytes go to a `Connection`, whose output goes to a callback."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

HIGH_WATER_BYTES = 1024
"""Unread bytes of output above which writing is paused."""


class Socket:
    """Accepts and ignores socket options."""

    def setsockopt(self, *_: object) -> None:
        """Ignore the option."""


class Transport(asyncio.Transport):
    """`on_output` gets the output of the server; `on_end` is called once, after `connection_lost`."""

    def __init__(self, number: int, on_output: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        super().__init__()
        self.peer = "127.0.0.1", number
        self.protocol: asyncio.Protocol
        self._on_output, self._on_end = on_output, on_end
        self._loop = asyncio.get_running_loop()
        self.unread_input: deque[bytes | None] = deque()
        """Input while the server does not read; None is the end of file."""
        self.paused = False
        self.stalled = False
        """The client does not read."""
        self.unread = 0
        self.is_observed = False
        """True if the output that is written now was reported earlier."""
        self._writing_paused = False
        self.closing = False
        self.closed_by_server = False
        """The server closed the connection."""
        self.ended = False

    def observe(self, data: Any) -> None:
        """Report output of the server."""
        if not self.ended:
            self._on_output(bytes(data))

    # -- the client's side --------------------------------------------------------------------------------

    def send_input(self, data: bytes | None) -> None:
        """Send bytes; None is the end of file."""
        if self.paused or self.unread_input:
            self.unread_input.append(data)
        elif not self.closing:
            self._pass_input(data)

    def drop(self) -> None:
        """Drop the connection."""
        self.closing = True
        self._loop.call_soon(self._end)

    def drain(self) -> None:
        """Read all output."""
        self.stalled, self.unread = False, 0
        if self._writing_paused and not self.ended:
            self._writing_paused = False
            self.protocol.resume_writing()
        if self.closing:
            self._loop.call_soon(self._end)

    # -- the server's side --------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self.ended or not data:
            return
        if not self.is_observed:
            self.observe(data)
        if self.stalled:
            self.unread += len(data)
            if self.unread > HIGH_WATER_BYTES and not self._writing_paused:
                self._writing_paused = True
                self.protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Keep the limit of the fuzzer, whose messages are few."""

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self.peer, "socket": Socket()}.get(name, default)

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        if self.paused:
            self.paused = False
            self._loop.call_soon(self._read)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Close: the client closes its side as soon as the server has."""
        self.close()

    def close(self) -> None:
        if not self.closing:
            self.closing = self.closed_by_server = True
            if not self.unread:
                self._loop.call_soon(self._end)

    def abort(self) -> None:
        if not self.ended:
            self.closed_by_server = self.closed_by_server or not self.closing
            self.closing = True
            self._loop.call_soon(self._end)

    def _read(self) -> None:
        while self.unread_input and not self.paused and not self.closing:
            self._pass_input(self.unread_input.popleft())

    def _pass_input(self, data: bytes | None) -> None:
        if data is None:
            self.protocol.eof_received()
        else:
            self.protocol.data_received(data)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.protocol.connection_lost(None)
            self._on_end()
