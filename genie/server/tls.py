"""TLS contexts of a server, for clients and for the admin port. They can be reloaded."""

from __future__ import annotations

import contextlib
import os
import ssl
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.tls import MIN_VERSION, certificate_expiry, load_ca, load_certificate
from genie.tls_accept import TurnsContext, TurnsObject

if TYPE_CHECKING:
    from genie.config import TlsSettings

HANDSHAKE_SOCKET: ContextVar[int] = ContextVar("HANDSHAKE_SOCKET")
"""File descriptor of the socket on which the current task runs a TLS handshake."""

NOT_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}
"""OpenSSL's error reasons for input that is not TLS."""
TLS_REQUIRED = replies.error(RequestRejected(Code.BAD_MESSAGE, "this server requires TLS"))
"""The message that is sent, unencrypted, to a client that does not use TLS."""


class TlsContexts:
    """The TLS contexts of a server, made from the certificate files in the settings.

    Raises ValueError, which names the setting and the file, if a file is invalid.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self.wire: ssl.SSLContext
        """The context for new client connections."""
        self._current_admin: ssl.SSLContext
        """The context that was loaded last for the admin port."""
        self.expiry: float | None
        """Unix time at which the server's certificate expires. None if the time cannot be read, which is no error."""
        self.reload(settings)
        self.admin = _make_context(settings, ssl.CERT_OPTIONAL)
        """The context for the admin port, where client certificates are optional. The listener keeps this object, so `reload`
        can't replace it: each handshake switches to `_current_admin`."""
        self.admin.sni_callback = self._use_current_admin

    def reload(self, settings: TlsSettings) -> None:
        """Read the certificate files, for new handshakes. Raises ValueError and changes nothing if a file is invalid."""
        self.wire, self._current_admin = (
            _make_context(settings, ssl.CERT_REQUIRED),
            _make_context(settings, ssl.CERT_OPTIONAL),
        )
        self.expiry = None
        with contextlib.suppress(OSError, ValueError):
            self.expiry = certificate_expiry(str(settings.cert))

    def _use_current_admin(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """SNI callback: switch a handshake on the admin port to the context that was loaded last."""
        handshake.context = self._current_admin


def make_tls_contexts(settings: TlsSettings) -> TlsContexts | None:
    """Return the TLS contexts, or None if no certificate is set.

    Raises ValueError for inconsistent settings or invalid files.
    """
    if settings.cert is None:
        for variable, file in (("GENIE_TLS_KEY", settings.key), ("GENIE_TLS_CA", settings.ca)):
            if file is not None:
                raise ValueError(f"{variable} is set, but GENIE_TLS_CERT, the server's certificate, is not")
        return None
    return TlsContexts(settings)


def _make_context(settings: TlsSettings, client_certificates: ssl.VerifyMode) -> ssl.SSLContext:
    """Return a context without session resumption, so that every handshake verifies the client's certificate.

    Without a CA in the settings, clients need no certificate and `client_certificates` has no effect.
    """
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


class _Handshake(TurnsObject):
    """Sends the TLS alert of a failed handshake to the client, which the event loop does not do."""

    outgoing: ssl.MemoryBIO
    file: int | None
    """File descriptor of the socket. None if it is unknown."""

    def do_handshake(self) -> None:
        """Continue the handshake. If it fails, send the TLS alert to the client and raise the error.

        A client that does not use TLS is sent an unencrypted error instead of the alert.
        """
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reply = TLS_REQUIRED if error.reason in NOT_TLS else self.outgoing.read()
            if self.file is not None:
                with contextlib.suppress(OSError):  # the client may be gone; the caller logs the failed handshake
                    os.write(self.file, reply)
            raise


class _Context(TurnsContext):
    """Creates a `_Handshake` for each connection."""

    sslobject_class = _Handshake

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """Create the TLS object of a connection, with its output buffer and socket, so that it can send a TLS alert."""
        handshake = super().wrap_bio(incoming, outgoing, *args, **options)
        if isinstance(handshake, _Handshake):
            handshake.outgoing, handshake.file = outgoing, HANDSHAKE_SOCKET.get(None)
        return handshake
