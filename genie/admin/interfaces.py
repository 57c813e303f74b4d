"""The parts of a server that the admin port uses: data to read, and the execution of commands, with which it releases locks."""

from __future__ import annotations

from collections.abc import Mapping
from ssl import SSLContext
from typing import Protocol

from genie.access import AccessControl
from genie.observability import metrics


class NamespaceView(metrics.NamespaceView, Protocol):
    """A namespace on a server: the data for the metrics, the address of the leader, and the execution of commands."""

    @property
    def leader(self) -> str | None:
        """Address of the leader. None if this server is not a follower, or does not know the leader."""

    async def execute(self, line: bytes) -> bytes:
        """Execute an encoded command, and return the encoded reply when the result is stored."""


class ServerView(metrics.ServerView, Protocol):
    """A server with its namespaces, its access control and its TLS settings."""

    @property
    def namespaces(self) -> Mapping[str, NamespaceView]:
        """The namespaces of the server by name. The first namespace is the default."""

    @property
    def access(self) -> AccessControl:
        """The current access control list. The server replaces the list when it reloads its tokens."""

    @property
    def admin_tls(self) -> SSLContext | None:
        """TLS context of the admin port, which may require client certificates. None for plain HTTP."""
