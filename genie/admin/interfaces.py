"""What the admin port wants to know of a server. It looks, and asks for one thing: that a lock be released."""

from __future__ import annotations

from collections.abc import Mapping
from ssl import SSLContext
from typing import Protocol

from genie.access import AccessControl
from genie.observability import metrics


class NamespaceView(metrics.NamespaceView, Protocol):
    """One namespace in a server: what its metrics are made of, and more."""

    @property
    def leader(self) -> str | None:
        """The address of the server that leads, where this one follows it."""

    async def execute(self, line: bytes) -> bytes:
        """Do what a line of the wire asks for; returns what a client would be told, when it is stored."""


class Subject(metrics.Source, Protocol):
    """A server, as far as the admin port is concerned."""

    @property
    def namespaces(self) -> Mapping[str, NamespaceView]:
        """Its namespaces, in order: the first is that of who says none."""

    @property
    def access(self) -> AccessControl:
        """Who may come in at present."""

    @property
    def admin_tls(self) -> SSLContext | None:
        """What the admin port speaks, if not plain HTTP. Who shows a certificate has shown a good one (`genie.tls`)."""
