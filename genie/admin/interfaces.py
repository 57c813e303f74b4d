"""The interface of a server that the admin port uses: read access, and one command, the release of a lock."""

from __future__ import annotations

from collections.abc import Mapping
from ssl import SSLContext
from typing import Protocol

from genie.access import AccessControl
from genie.observability import metrics


class NamespaceView(metrics.NamespaceView, Protocol):
    """A namespace on a server: what its metrics need, its leader, and command execution."""

    @property
    def leader(self) -> str | None:
        """Address of the leading server, where this server is a follower."""

    async def execute(self, line: bytes) -> bytes:
        """Execute a command line of the wire format; return the reply line once the result is stored."""


class ServerView(metrics.ServerView, Protocol):
    """A server with its namespaces, its access control and its TLS settings."""

    @property
    def namespaces(self) -> Mapping[str, NamespaceView]:
        """Its namespaces by name, in order; the first is the default."""

    @property
    def access(self) -> AccessControl:
        """The current access control list; it changes when the server reloads its tokens."""

    @property
    def admin_tls(self) -> SSLContext | None:
        """TLS context of the admin port; None for plain HTTP. Client certificates are verified (`genie.tls`)."""
