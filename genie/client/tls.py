"""TLS of a client: what it accepts of a server, and what it shows."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable


class Tunnel:
    """TLS over a socket that somebody else reads and writes: bytes go in and come out, and nothing ever waits.

    So whoever holds the client's lock may use it, whichever thread reads from the socket and whichever writes.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def shake_hands(self, send: Callable[[bytes], None], receive: Callable[[], bytes]) -> None:
        """Do all of the handshake. OSError where it fails; what `send` and `receive` raise comes out."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                send(self._outgoing.read())
                data = receive()
                if not data:
                    raise ConnectionResetError("the server closed it in the TLS handshake") from None
                self._incoming.write(data)
            except ssl.SSLError:
                send(self._outgoing.read())  # what it does not like
                raise
            else:
                send(self._outgoing.read())
                return

    def wrap(self, data: bytes) -> bytes:
        """What is to be sent for these bytes, and for TLS itself."""
        if data:
            self._tls.write(data)
        return self._outgoing.read()

    def unwrap(self, data: bytes) -> bytes | None:
        """The bytes in what was received; None where the server has said that they were the last. SSLError."""
        self._incoming.write(data)
        parts: list[bytes] = []
        while True:
            try:
                part = self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                part = b""
            if not part:
                return b"".join(parts) or None
            parts.append(part)
        return b"".join(parts)

    def last(self) -> bytes:
        """What is to be sent at the end."""
        with contextlib.suppress(ssl.SSLError):  # it waits for the same of the server
            self._tls.unwrap()
        return self._outgoing.read()
