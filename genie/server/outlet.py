"""What one client is told: gathered while a batch is under way, sent when it is stored, and no more of it than is read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from genie.errors import Code, RequestRejected
from genie.protocol import replies

if TYPE_CHECKING:
    from genie.config import Settings

log = structlog.get_logger()

CUT_S = 5.0
"""How long a client that has left too much unread is given to read it after all, and why it is cut off."""


class Outlet(asyncio.Protocol):
    """The side of a connection that writes; reading waits for it where the client does not keep up."""

    __slots__ = (
        "_behind",
        "_settings",
        "_transport",
        "closed",
        "ending",
        "late",
        "out",
        "paused",
        "shown",
        "urgent",
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self.out: list[bytes] = []
        """What the batch under way has to tell this client."""
        self.urgent = False
        """Some of that answers it, or is about its requests. The rest is what it watches."""
        self.late: list[bytes] = []
        """What it watches and has still to be told, from batches that are stored."""
        self.shown = 0
        """Bytes of what it watches, in `out` and `late`."""
        self.ending = False
        """Nothing more is read; what was read is answered."""
        self.closed = False
        self._behind = False
        """The client leaves answers unread."""
        self.paused = False
        """Too many of its commands wait for their turn."""

    def gone(self) -> None:
        """Nobody is there any more, as far as those are concerned who carry out what was said."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send all that the batch has told this client, in one write."""
        self.urgent = False
        if self.late:
            self.late += self.out
            self.out.clear()
            self.flush_late()
        else:
            data = b"".join(self.out)
            self.out.clear()
            self._write(data)
        self.shown = 0

    def postpone(self) -> None:
        """The batch has told this client only of what it watches: that goes with the next answer, or a little later."""
        self.late += self.out
        self.out.clear()

    def flush_late(self) -> None:
        """Send what it watches."""
        data = b"".join(self.late)
        self.late.clear()
        self.shown -= len(data)
        self._write(data)

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if not data or self.closed or transport is None:
            return
        if self._behind and transport.get_write_buffer_size() > self._settings.max_unread:
            self._cut(transport)  # asked before writing: who reads may be told much at once
        else:
            transport.write(data)

    def _cut(self, transport: asyncio.Transport) -> None:
        """The client leaves too much unread: that is the last thing it is told, if it reads on before long."""
        why = f"{self._settings.max_unread} bytes wait to be read, and more: the connection ends here"
        transport.write(replies.error(RequestRejected(Code.TOO_MANY, why)))
        self.stop_reading()
        transport.close()
        self.closed = True
        self.gone()
        log.warning("cut off", peer=transport.get_extra_info("peername"), unread=transport.get_write_buffer_size())
        asyncio.get_running_loop().call_later(CUT_S, transport.abort)

    @property
    def unread(self) -> int:
        """Bytes that wait for the client to read them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def finish(self) -> None:
        """Close when all that was written has been sent."""
        if self.late:
            self.flush_late()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read nothing for now: too much waits for the store."""
        self.paused = True
        self._read_on()

    def resume(self) -> None:
        """Go on reading."""
        self.paused = False
        self._read_on()

    def stop_reading(self) -> None:
        """Take no more commands from this client."""
        self.ending = True
        self._read_on()

    def pause_writing(self) -> None:
        """The client does not read its answers: read no more of its commands."""
        self._behind = True
        self._read_on()

    def resume_writing(self) -> None:
        """It has read enough of them."""
        self._behind = False
        self._read_on()

    def _read_on(self) -> None:
        """Read, unless there is a reason not to. (Both calls may be repeated.)"""
        if self._transport is None or self._transport.is_closing():
            return
        if self._behind or self.paused or self.ending:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
