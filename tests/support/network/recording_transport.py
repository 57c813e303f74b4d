"""A transport without a socket, for unit tests of the server's connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class FakeSocket:
    """Accepts and ignores socket options."""

    def setsockopt(self, *_: object) -> None: ...


class RecordingTransport(asyncio.Transport):
    """Calls `on_write` with the bytes of each write."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_write = on_write
        self.is_ended = False
        """True if the server has closed its sending side."""
        self.unread_bytes: int | None = None
        """The bytes that the client has not read. None if it reads all output."""

    def write(self, data: Any) -> None:
        self._on_write(bytes(data))
        if self.unread_bytes is not None:
            self.unread_bytes += len(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "socket": FakeSocket()}.get(name, default)

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes or 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_ended = True

    def close(self) -> None:
        self.is_ended = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
