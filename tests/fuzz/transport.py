"""A client's end of a connection, without sockets: bytes go to the server's `Connection`, and what it writes is heard."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

HIGH = 1024
"""Bytes that are left unread before the server is told that it writes too much."""


class Socket:
    """What options are set on."""

    def setsockopt(self, *_: object) -> None:
        """Nothing to set."""


class Transport(asyncio.Transport):
    """`hear` is given what the server writes; `ended` is called once, when the connection has ended for the server."""

    def __init__(self, number: int, hear: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        super().__init__()
        self.peer = "127.0.0.1", number
        self.protocol: asyncio.Protocol
        self._hear, self._ended = hear, ended
        self._loop = asyncio.get_running_loop()
        self.coming: deque[bytes | None] = deque()
        """What was said while the server did not read; None is the end."""
        self.paused = False
        self.stalled = False
        """The client does not read."""
        self.unread = 0
        self._behind = False
        self.closing = False
        self.hung_up = False
        """It was the server that ended it."""
        self.over = False

    # -- the client's side --------------------------------------------------------------------------------

    def say(self, data: bytes | None) -> None:
        """Bytes, or None: that was all."""
        if self.paused or self.coming:
            self.coming.append(data)
        elif not self.closing:
            self._give(data)

    def drop(self) -> None:
        """The client is gone."""
        self.closing = True
        self._loop.call_soon(self._lose)

    def drain(self) -> None:
        """The client reads again, all of it."""
        self.stalled, self.unread = False, 0
        if self._behind and not self.over:
            self._behind = False
            self.protocol.resume_writing()
        if self.closing:
            self._loop.call_soon(self._lose)

    # -- the server's side --------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self.over or not data:
            return
        self._hear(bytes(data))
        if self.stalled:
            self.unread += len(data)
            if self.unread > HIGH and not self._behind:
                self._behind = True
                self.protocol.pause_writing()

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
        """The client ends its side when the server has ended the other."""
        self.close()

    def close(self) -> None:
        if not self.closing:
            self.closing = self.hung_up = True
            if not self.unread:
                self._loop.call_soon(self._lose)

    def abort(self) -> None:
        if not self.over:
            self.hung_up = self.hung_up or not self.closing
            self.closing = True
            self._loop.call_soon(self._lose)

    def _read(self) -> None:
        while self.coming and not self.paused and not self.closing:
            self._give(self.coming.popleft())

    def _give(self, data: bytes | None) -> None:
        if data is None:
            self.protocol.eof_received()
        else:
            self.protocol.data_received(data)

    def _lose(self) -> None:
        if not self.over:
            self.over = True
            self.protocol.connection_lost(None)
            self._ended()
