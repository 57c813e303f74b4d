"""TLS of a server: contexts for clients and for the admin port, and their reload."""

from __future__ import annotations

import contextlib
import os
import ssl
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.tls import MIN_VERSION, load_ca, load_certificate

if TYPE_CHECKING:
    from genie.config import TlsSettings

HANDSHAKE_SOCKET: ContextVar[int] = ContextVar("HANDSHAKE_SOCKET")
"""File descriptor of the socket of the handshake that this task runs."""

NOT_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}
"""Error reasons of OpenSSL for input that is not TLS."""
TLS_REQUIRED = replies.error(RequestRejected(Code.BAD_MESSAGE, "this server requires TLS"))
"""Sent, unencrypted, to a client that does not use TLS."""


class TlsContexts:
    """The TLS contexts of the server, for the certificate files in the settings.

    Raises ValueError with the setting and the file that is invalid.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self.wire = self._make_context(ssl.CERT_REQUIRED)
        """For new connections of clients. `reload` replaces it."""
        self._current_admin = self._make_context(ssl.CERT_OPTIONAL)
        self.admin = self._make_context(ssl.CERT_OPTIONAL)
        """For the admin port, where client certificates are optional. The listener keeps this object, so `reload` cannot
        replace it: each handshake switches to the context that was loaded last."""
        self.admin.sni_callback = self._use_current_admin

    def reload(self) -> None:
        """Read the files again, for new handshakes. If they are invalid, raise ValueError and change nothing."""
        self.wire, self._current_admin = (
            self._make_context(ssl.CERT_REQUIRED),
            self._make_context(ssl.CERT_OPTIONAL),
        )

    def _make_context(self, client_certificates: ssl.VerifyMode) -> ssl.SSLContext:
        """Return a context without session resumption, so that every handshake verifies the client's certificate.

        `client_certificates` counts only if the settings have a CA.
        """
        settings = self._settings
        assert settings.cert is not None, "TLS needs a certificate"  # noqa: S101
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = MIN_VERSION
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        load_certificate(context, settings.cert, settings.key)
        if settings.ca is not None:
            load_ca(context, settings.ca)
            context.verify_mode = client_certificates
        return context

    def _use_current_admin(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """SNI callback of the admin port: use the context that was loaded last."""
        handshake.context = self._current_admin


def make_tls_contexts(settings: TlsSettings) -> TlsContexts | None:
    """Return the contexts, or None without a certificate. ValueError for inconsistent settings or invalid files."""
    if settings.cert is None:
        for variable, file in (("GENIE_TLS_KEY", settings.key), ("GENIE_TLS_CA", settings.ca)):
            if file is not None:
                raise ValueError(f"{variable} is set, but GENIE_TLS_CERT, the server's certificate, is not")
        return None
    return TlsContexts(settings)


class _Handshake(ssl.SSLObject):
    """Sends the TLS alert of a failed handshake to the client; event loops close the connection without it."""

    outgoing: ssl.MemoryBIO
    file: int | None

    def do_handshake(self) -> None:
        """Continue the handshake. If it fails, send the alert, or plain text to a client without TLS."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reply = TLS_REQUIRED if error.reason in NOT_TLS else self.outgoing.read()
            if self.file is not None:
                with contextlib.suppress(OSError):  # the client does not read; the reason is logged
                    os.write(self.file, reply)
            raise


class _Context(ssl.SSLContext):
    """Creates a `_Handshake` for each connection."""

    sslobject_class = _Handshake

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """Give the handshake its output buffer and socket, so that it can send an alert itself."""
        handshake = super().wrap_bio(incoming, outgoing, *args, **options)
        if isinstance(handshake, _Handshake):
            handshake.outgoing, handshake.file = outgoing, HANDSHAKE_SOCKET.get(None)
        return handshake
