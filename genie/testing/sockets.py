"""What stands for a socket where the network is simulated."""

from __future__ import annotations

import socket


class SimSocket:
    """What `get_extra_info("socket")` gives: options are taken and ignored."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM

    def __init__(self, own: tuple[str, int], peer: tuple[str, int] | None = None) -> None:
        self._own = own
        self._peer = peer

    def setsockopt(self, *_arguments: object) -> None:
        """Ignore it."""

    def getsockname(self) -> tuple[str, int]:
        """The own address."""
        return self._own

    def getpeername(self) -> tuple[str, int]:
        """The other side's."""
        if self._peer is None:
            raise OSError("not connected")
        return self._peer

    def fileno(self) -> int:
        """None."""
        return -1

    def close(self) -> None:
        """Nothing to close."""
