"""A connection of a server without a socket: it only hears what is written to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Socket:
    """What options are set on."""

    def setsockopt(self, *_: object) -> None: ...


class Hearing(asyncio.Transport):
    """`hear` is given each write."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        super().__init__()
        self._hear = hear

    def write(self, data: Any) -> None:
        self._hear(bytes(data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "socket": Socket()}.get(name, default)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...
    def close(self) -> None: ...

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
