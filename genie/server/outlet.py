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


LINGER_S = 5.0
"""Seconds for which a connection that is being closed discards what its client still sends, at most."""
LINGER_BYTES = 64 << 20
"""Bytes that it discards at most."""
LINGER_IDLE_S = 1.0
"""Seconds without a byte after which it is closed."""


class Outlet(asyncio.Protocol):
    """The side of a connection that writes; reading waits for it where the client does not keep up."""

    __slots__ = (
        "_behind",
        "_eof",
        "_lingered",
        "_lingers_until",
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
        """Nothing more is executed; what was read is answered."""
        self._eof = False
        """The client has sent everything."""
        self._lingers_until = 0.0
        """Until when (event loop's clock) the client's bytes are discarded. 0: they are not."""
        self._lingered = 0
        """Bytes that were discarded."""
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
        if not data or self.closed or transport is None or self._lingers_until:
            return
        if self._behind and transport.get_write_buffer_size() > self._settings.max_unread:
            self._cut(transport)  # asked before writing: who reads may be told much at once
        else:
            transport.write(data)

    def _cut(self, transport: asyncio.Transport) -> None:
        """The client leaves too much unread: that is the last thing it is told, if it reads on before long."""
        why = f"{self._settings.max_unread} bytes wait to be read, and more: the connection ends here"
        transport.write(replies.error(RequestRejected(Code.TOO_MANY, why)))
        self.closed = True
        self.finish()
        self.gone()
        log.warning("cut off", peer=transport.get_extra_info("peername"), unread=transport.get_write_buffer_size())
        asyncio.get_running_loop().call_later(CUT_S, transport.abort)

    @property
    def unread(self) -> int:
        """Bytes that wait for the client to read them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def finish(self) -> None:
        """Send everything, then close, and discard for a moment what the client still sends.

        Bytes that nothing reads would make the kernel reset the connection, and the last messages would be lost.
        """
        if self.late:
            self.flush_late()
        self.ending = True
        transport = self._transport
        if transport is None or transport.is_closing() or self._lingers_until:
            return
        if self._eof or not transport.can_write_eof():  # TLS has no half-close: its close discards what comes by itself
            transport.close()
            return
        loop = asyncio.get_running_loop()
        self._lingers_until = loop.time() + LINGER_S
        transport.write_eof()
        loop.call_later(LINGER_IDLE_S, self._end_lingering, 0)
        self._read_on()

    def _end_lingering(self, lingered: int) -> None:
        """Close, unless the client has sent more than `lingered` bytes, the number when this was last called."""
        transport, loop = self._transport, asyncio.get_running_loop()
        if transport is None or transport.is_closing():
            return
        if self._lingered == lingered or loop.time() >= self._lingers_until:
            transport.close()
        else:
            loop.call_later(LINGER_IDLE_S, self._end_lingering, self._lingered)

    def _discard(self, data: bytes) -> None:
        """Discard what the client sends after its connection was ended."""
        self._lingered += len(data)
        if self._lingers_until and self._lingered > LINGER_BYTES and self._transport is not None:
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

    @property
    def reading_is_paused(self) -> bool:
        """Whether the server reads nothing from the client now, but will again."""
        return self.paused or self._behind

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
        if self._lingers_until:
            self._transport.resume_reading()
        elif self._behind or self.paused or self.ending:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
