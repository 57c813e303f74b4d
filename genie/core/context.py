"""The context of a request, which only the server reads. The lock manager returns it with its events."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol


class Origin(Protocol):
    """The session that made a request. The lock manager reads nothing of it."""

    key: str | None
    """Identifies a session that survives its connection and a restart of the server; None if the
    session ends with its connection."""
    timeout_ms: float
    """Time in ms for which the session lasts without a connection."""
    note: str | None
    """The note of all requests of the session that have no `note` of their own."""


@dataclass(slots=True, init=False, unsafe_hash=True)
class Context:
    """The principal that made a request, and what the client sent for display and tracing.

    Immutable, because requests may share it.
    """

    principal: str | None
    """The name of the authenticated principal that made the request."""
    note: str | None
    """The request's own note, a free text. Operators see `shown_note`."""
    traceparent: str | None
    """The trace context of the client's request (W3C Trace Context)."""
    choice_digest: str | None
    """For the request of a `Take`: a digest of its choices, which identifies a retry."""

    def __init__(  # written out because mypyc compiles it
        self,
        principal: str | None = None,
        note: str | None = None,
        traceparent: str | None = None,
        choice_digest: str | None = None,
    ) -> None:
        self.principal = principal
        self.note = note
        self.traceparent = traceparent
        self.choice_digest = choice_digest

    def with_principal(self, name: str) -> Context:
        """Return the same context for the request of a principal."""
        return context_of(name, self.note, self.traceparent, self.choice_digest)


def context_of(
    principal: str | None = None,
    note: str | None = None,
    traceparent: str | None = None,
    choice_digest: str | None = None,
) -> Context:
    """Return a context. Requests without texts of the client share one context, so that it takes no memory in each request."""
    if note is None and traceparent is None and choice_digest is None:
        shared: Context = _shared(principal)
        return shared
    return Context(principal, note, traceparent, choice_digest)


_shared = lru_cache(maxsize=1024)(Context)

NO_CONTEXT: Final = Context()


class HasContext(Protocol):
    """The part of a request that the functions of this module read."""

    @property
    def context(self) -> Context: ...  # noqa: D102
    @property
    def origin(self) -> Origin | None: ...  # noqa: D102


def shown_note(request: HasContext) -> str | None:
    """Return the note for operators and for blocked requests: the request's own note, or else the note of its session."""
    note = request.context.note
    return request.origin.note if note is None and request.origin is not None else note


def shown_context(request: HasContext) -> Context:
    """Return the context of a request with its `shown_note`, which stays the same when the session ends."""
    context, origin = request.context, request.origin
    if context.note is not None or origin is None or origin.note is None:
        return context
    return Context(context.principal, origin.note, context.traceparent, context.choice_digest)
