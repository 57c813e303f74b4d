"""TLS of a server: its certificate, who may show one, and both anew when they have changed."""

from __future__ import annotations

import contextlib
import os
import ssl
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.tls import OLDEST, load_ca, load_pair

if TYPE_CHECKING:
    from genie.config import Settings

FILE: ContextVar[int] = ContextVar("FILE")
"""The socket of the handshake that begins, by its number."""

NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}
PLAIN_REFUSED = replies.error(RequestRejected(Code.BAD_MESSAGE, "this server speaks TLS only"))
"""What a client is told that doesn't speak it."""


class TlsContexts:
    """The certificate that the settings name, for the wire and for the admin port.

    ValueError names the setting and the file where something is wrong with them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.wire = self._make(ssl.CERT_REQUIRED)
        """For the next connection. Another after each `reload`, so a session from before it can't be resumed."""
        self._admin_now = self._make(ssl.CERT_OPTIONAL)
        self.admin = self._make(ssl.CERT_OPTIONAL)
        """For the admin port: who shows a certificate there must have a good one, but nobody has to. Always the same,
        since who listens keeps it; each handshake goes on with what was loaded last."""
        self.admin.sni_callback = self._go_on_anew

    def reload(self) -> None:
        """Read the files again, for all handshakes from now on. ValueError where they are wrong: then nothing changes."""
        self.wire, self._admin_now = self._make(ssl.CERT_REQUIRED), self._make(ssl.CERT_OPTIONAL)

    def _make(self, clients: ssl.VerifyMode) -> ssl.SSLContext:
        settings = self._settings
        assert settings.tls_cert is not None, "without a certificate there is no TLS"  # noqa: S101
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = OLDEST
        context.num_tickets = 0  # who comes again shows its certificate again: it may not be good any more
        context.options |= ssl.OP_NO_TICKET
        load_pair(context, settings.tls_cert, settings.tls_key)
        if settings.tls_ca is not None:
            load_ca(context, settings.tls_ca)
            context.verify_mode = clients
        return context

    def _go_on_anew(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self._admin_now


def make_tls_contexts(settings: Settings) -> TlsContexts | None:
    """That which the settings ask for. ValueError where they contradict themselves, or the files are wrong."""
    if settings.tls_cert is None:
        for name in ("tls_key", "tls_ca"):
            if getattr(settings, name) is not None:
                raise ValueError(f"GENIE_{name.upper()} is set, but GENIE_TLS_CERT, the server's certificate, is not")
        return None
    return TlsContexts(settings)


class _Handshake(ssl.SSLObject):
    """Tells the client why its handshake failed. The event loops would just cut it off."""

    outgoing: ssl.MemoryBIO
    file: int | None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            last = PLAIN_REFUSED if error.reason in NO_TLS else self.outgoing.read()
            if self.file is not None:
                with contextlib.suppress(OSError):  # it listens no more, or will not: the log has the reason
                    os.write(self.file, last)
            raise


class _Context(ssl.SSLContext):
    sslobject_class = _Handshake

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **options)
        if isinstance(made, _Handshake):
            made.outgoing, made.file = outgoing, FILE.get(None)
        return made
