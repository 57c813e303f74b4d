"""OpenTelemetry for the Python clients: `genie.otel.instrument()`. Requires the extra `otel`.

Every request has a span for its wait and, if it is granted, a child span for its hold. The request carries the trace context
of its wait as `traceparent`. If a request has to wait, the span of its wait has an event for each blocker, and a link to the
span of each blocker that sent its own trace context. The server names the blockers when it ends or grants the request.

`instrument` replaces the class of the requests and four functions of the clients. Clients without instrumentation therefore
execute no additional instruction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TracerProvider
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "genie.otel needs the package opentelemetry-api: pip install 'genie-lock[otel]'", name=error.name
    ) from None

from genie import errors
from genie.client import aio, commands, sync
from genie.client.aio_connection import AsyncConnection
from genie.client.commands import Request, RequestState
from genie.client.config import Address
from genie.client.requests import Requests
from genie.client.session import ClientSession
from genie.client.sync_connection import SyncConnection
from genie.errors import LockLost
from genie.protocol import messages
from genie.protocol.framing import MAX_LINE_BYTES
from genie.version import VERSION

__all__ = ["instrument", "uninstrument"]

MAX_RESOURCES: Final = 10
"""Maximum number of resources in the attributes of a span."""
BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Bounds of the histograms, in seconds."""
OUTCOMES: Final[Sequence[tuple[type[BaseException], str]]] = (
    (errors.QueueTimeout, "queue-timeout"),
    (errors.Deadlock, "deadlock"),
    (errors.Insufficient, "insufficient"),
    (errors.TransactionTimeout, "transaction-timeout"),
    (errors.Disconnected, "disconnected"),
    (errors.LockLost, "lost"),
    (errors.RequestRejected, "rejected"),
    (errors.Unavailable, "unavailable"),
    (errors.ConnectionLost, "connection-lost"),
    (asyncio.CancelledError, "cancelled"),
    (KeyboardInterrupt, "cancelled"),
)
"""The outcome that spans and metrics show for an exception: that of the first class of which it is an instance."""
NOT_FAILURES: Final = frozenset({"queue-timeout", "insufficient"})
"""Outcomes of a request that must not wait (`try_acquire`, `acquire_any`) that are no errors of its span."""


class _Telemetry:
    """The tracer and the instruments of one call of `instrument`."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self.tracer = trace.get_tracer("genie", VERSION, tracer_provider)
        meter = metrics.get_meter("genie", VERSION, meter_provider)
        self.waits = meter.create_histogram(
            "genie.client.wait.duration",
            unit="s",
            description="Time from a request to its grant or its end.",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )
        self.holds = meter.create_histogram(
            "genie.client.hold.duration",
            unit="s",
            description="Time from a grant to the release or the loss of the lock.",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )


class TracedRequest(Request):
    """A request with a span for its wait and a span for its hold.

    The assignments of `state` and `error`, on all paths of both clients, end the spans. In the client for threads they run in
    the background thread.
    """

    __slots__ = ("_address", "_error", "_hold", "_mode", "_since", "_state", "_telemetry", "_wait")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._state = RequestState.WAITING
        self._error: LockLost | None = None
        self._telemetry = _patches.telemetry
        self._wait: Span | None = None
        """The span of the wait; after the grant the parent of the hold. None: the request was not sent."""
        self._hold: Span | None = None
        """The span of the hold, until it ends."""
        self._address: Address | None = None
        """The server to which the request was sent; None: there was no connection."""
        self._since = 0.0
        """When the wait or the hold began, in seconds of the monotonic clock. 0: neither takes place."""
        super().__init__(*args, **kwargs)
        self._mode = _mode(self.resources)

    @property
    def state(self) -> RequestState:
        """The state of the request. A grant ends the wait, and a release or `detach` ends the hold."""
        return self._state

    @state.setter
    def state(self, state: RequestState) -> None:  # the client sets it
        before, self._state = self._state, state
        if before is RequestState.WAITING:
            if state is RequestState.HELD:
                self._start_hold()
        elif before is RequestState.HELD:
            if state is RequestState.RELEASING:
                self.end_hold("released")
            elif state is RequestState.DETACHED:
                self.end_hold("detached")

    @property
    def error(self) -> LockLost | None:
        """The error with which the lock was lost, which ends the hold. None if the lock is not lost."""
        return self._error

    @error.setter
    def error(self, error: LockLost | None) -> None:
        self._error = error
        if error is not None:
            self.end_hold(_outcome(error), error)

    def start_wait(self, address: Address | None) -> None:
        """Start the wait in the trace of the caller. If it is sampled, add its trace context to the encoded request.

        Without sampling no context is sent, because the server would search for blockers that no trace shows.
        """
        self._address = address
        self._since = time.monotonic()
        attributes: dict[str, Any] = {"genie.resources": self.resources[:MAX_RESOURCES], "genie.mode": self._mode}
        if self.transaction is not None:
            attributes["genie.transaction"] = self.transaction
        if address is not None:
            attributes["server.address"], attributes["server.port"] = address[:2]
        self._wait = self._telemetry.tracer.start_span("genie.wait", kind=SpanKind.CLIENT, attributes=attributes)
        context = self._wait.get_span_context()
        if not (context.is_valid and context.trace_flags.sampled):
            return
        line = b'%b,"traceparent":"00-%032x-%016x-%02x"}}\n' % (
            self.line[:-3],  # without `}}` and the line end
            context.trace_id,
            context.span_id,
            context.trace_flags,
        )
        if len(line) <= MAX_LINE_BYTES:
            self.line = line

    def add_blockers(self, blockers: Iterable[errors.Blocker]) -> None:
        """Add the blockers of a granted request to its wait. Does nothing if the wait has ended, because it was cancelled."""
        if self._wait is not None and self._wait.is_recording():
            _add_blockers(self._wait, blockers)

    def fail_wait(self, error: BaseException) -> None:
        """End the wait of a request that was not granted. Does nothing after the grant."""
        span = self._wait
        if span is None or not self._since or self._hold is not None:
            return
        outcome = _outcome(error)
        is_failure = outcome != "cancelled" and not (self.queue_timeout == 0 and outcome in NOT_FAILURES)
        if span.is_recording():
            _add_blockers_of_error(span, error)
            _set_failure(span, error, is_failure=is_failure)
        self._end_wait(span, outcome, error if is_failure else None)
        self._since = 0.0

    def end_hold(self, outcome: str, error: BaseException | None = None) -> None:
        """End the span of the hold, and record its duration. Does nothing if no hold has started, or if it has ended."""
        span, self._hold = self._hold, None
        if span is None:
            return
        held_s = time.monotonic() - self._since
        self._since = 0.0
        if span.is_recording():
            span.set_attribute("genie.outcome", outcome)
            if error is not None:
                _set_failure(span, error, is_failure=True)
        span.end()
        self._telemetry.holds.record(held_s, _metric_attributes(self._mode, outcome, self._address, _type_name(error)))

    def _start_hold(self) -> None:
        """End the wait, because the request is granted, and start the hold as its child."""
        if self._wait is None:
            return
        is_sampled = self._wait.is_recording()
        self._end_wait(self._wait, "granted", error=None)
        if not is_sampled:  # the hold is only measured
            self._hold = trace.INVALID_SPAN
            return
        attributes: dict[str, Any] = {
            "genie.resources": self.resources[:MAX_RESOURCES],
            "genie.mode": self._mode,
            "genie.request.id": self.id,
            "genie.fence": self.fence,
        }
        if self.transaction is not None:
            attributes["genie.transaction"] = self.transaction
        context = trace.set_span_in_context(self._wait)
        self._hold = self._telemetry.tracer.start_span("genie.hold", context, attributes=attributes)

    def _end_wait(self, span: Span, outcome: str, error: BaseException | None) -> None:
        """End the span of the wait, and record the wait in the metrics. `_since` becomes the start of the hold."""
        now = time.monotonic()
        waited, self._since = now - self._since, now
        if span.is_recording():
            attributes: dict[str, Any] = {"genie.outcome": outcome, "genie.waited": waited}
            if self.id:
                attributes["genie.request.id"] = self.id
            if self.fence:
                attributes["genie.fence"] = self.fence
            span.set_attributes(attributes)
        span.end()
        self._telemetry.waits.record(waited, _metric_attributes(self._mode, outcome, self._address, _type_name(error)))


# -- attributes, events and links -----------------------------------------------------------------------


def _mode(resources: Sequence[str]) -> str:
    """Return `exclusive` or `shared` if all resources have this mode, else `mixed`."""
    if len(resources) == 1:
        return resources[0].partition(":")[0]
    modes = {resource.partition(":")[0] for resource in resources}
    return modes.pop() if len(modes) == 1 else "mixed"


def _outcome(error: BaseException) -> str:
    """Return the name of the outcome of a request that failed with an error."""
    return next((name for kind, name in OUTCOMES if isinstance(error, kind)), "error")


def _type_name(error: BaseException | None) -> str:
    """Return the value of `error.type`: the qualified name of the exception; empty if there is none."""
    return "" if error is None else f"{type(error).__module__}.{type(error).__qualname__}"


@lru_cache(maxsize=256)
def _metric_attributes(mode: str, outcome: str, address: Address | None, error_type: str) -> dict[str, Any]:
    """Return the attributes of a measurement. They have few values, so they do not contain the resources."""
    attributes: dict[str, Any] = {"genie.mode": mode, "genie.outcome": outcome}
    if address is not None:
        attributes["server.address"], attributes["server.port"] = address[:2]
    if error_type:
        attributes["error.type"] = error_type
    return attributes


def _set_failure(span: Span, error: BaseException, *, is_failure: bool) -> None:
    """Set the status and the error type of a span that ends with an error."""
    if is_failure:
        span.set_attribute("error.type", _type_name(error))
        span.set_status(Status(StatusCode.ERROR, str(error)))


def _add_blockers(span: Span, blockers: Iterable[errors.Blocker]) -> None:
    """Add an event for each request that blocked this request, and a link to each that sent its context."""
    for blocker in blockers:
        attributes: dict[str, Any] = {
            "genie.request.id": blocker.id,
            "genie.resource": blocker.resource,
            "genie.mode": blocker.mode,
            "genie.state": blocker.state,
            "genie.since": blocker.since,
        }
        if blocker.transaction is not None:
            attributes["genie.transaction"] = blocker.transaction
        _add_blocker(span, attributes, blocker.note, blocker.traceparent)


def _add_blockers_of_error(span: Span, error: BaseException) -> None:
    """Add the events and links of the requests in the error that blocked this request."""
    if isinstance(error, errors.QueueTimeout):
        _add_blockers(span, error.blockers)
    elif isinstance(error, errors.Deadlock):
        for step in error.waits:
            attributes: dict[str, Any] = {
                "genie.request.id": step.waiter,
                "genie.resource": step.resource,
                "genie.holder.id": step.holder,
                "genie.state": "queued",
            }
            _add_blocker(span, attributes, step.note, step.traceparent)


def _add_blocker(span: Span, attributes: dict[str, Any], note: str | None, traceparent: str | None) -> None:
    """Add the event of one blocker and, unless it is this request, the link to its span."""
    if note is not None:
        attributes["genie.note"] = note
    context = None if traceparent is None else _parse(traceparent)
    if context is not None:
        attributes["genie.trace_id"] = f"{context.trace_id:032x}"
        if context.span_id != span.get_span_context().span_id:
            link = {name: attributes[name] for name in ("genie.request.id", "genie.resource", "genie.state")}
            span.add_link(context, link)
    span.add_event("genie.blocker", attributes)


def _parse(traceparent: str) -> SpanContext | None:
    """Parse a `traceparent` of W3C Trace Context; None if it is invalid."""
    try:
        _, trace_id, span_id, flags = traceparent.split("-")
        context = SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
        )
    except ValueError:
        return None
    return context if context.is_valid else None


# -- instrumentation ------------------------------------------------------------------------------------

_acquire = aio.acquire
_acquire_sync = sync.acquire
_on_locked = Requests.on_locked
_finish_close = ClientSession.finish_close


async def _traced_acquire(connection: AsyncConnection, request: Request) -> aio.Lock:
    """Acquire a lock of the asyncio client, with the span of the wait."""
    if not isinstance(request, TracedRequest):  # made before `instrument`
        return await _acquire(connection, request)
    request.start_wait(connection.address)
    try:
        return await _acquire(connection, request)
    except BaseException as error:
        request.fail_wait(error)
        raise


def _traced_acquire_sync(connection: SyncConnection, request: Request) -> sync.Lock:
    """Acquire a lock of the client for threads, with the span of the wait."""
    if not isinstance(request, TracedRequest):  # made before `instrument`
        return _acquire_sync(connection, request)
    request.start_wait(connection.aio.address)
    try:
        return _acquire_sync(connection, request)
    except BaseException as error:
        request.fail_wait(error)
        raise


def _traced_on_locked(requests: Requests, locked: messages.Locked.Payload, now: float) -> None:
    """Handle `locked`. If the granted request had to wait, add its blockers to the span of the wait, which ends now."""
    if locked.blockers:
        request = requests.find(locked.ref)
        if isinstance(request, TracedRequest):
            request.add_blockers(row.to_blocker() for row in locked.blockers)
    _on_locked(requests, locked, now)


def _traced_finish_close(session: ClientSession) -> list[commands.Outcome]:
    """Close a session. Locks that stay held at the server are no longer held by this client."""
    held = [request for request in session.requests.held() if isinstance(request, TracedRequest)]
    outcomes = _finish_close(session)
    for request in held:
        request.end_hold("kept")  # does nothing for a lock that was lost
    return outcomes


class _Patches:
    """The state of the instrumentation: which attributes of the clients are replaced, and the telemetry of new requests."""

    REPLACED: Final[Sequence[tuple[object, str, object, object]]] = (
        (commands, "request_type", Request, TracedRequest),
        (aio, "acquire", _acquire, _traced_acquire),
        (sync, "acquire", _acquire_sync, _traced_acquire_sync),
        (Requests, "on_locked", _on_locked, _traced_on_locked),
        (ClientSession, "finish_close", _finish_close, _traced_finish_close),
    )
    """Owner, name, original and replacement of each attribute."""

    def __init__(self) -> None:
        self.telemetry: _Telemetry

    def apply(self, telemetry: _Telemetry) -> None:
        """Replace the attributes. New requests use `telemetry`."""
        self.telemetry = telemetry
        for owner, name, _, replacement in self.REPLACED:
            setattr(owner, name, replacement)

    def undo(self) -> None:
        """Restore the attributes."""
        for owner, name, original, _ in self.REPLACED:
            setattr(owner, name, original)


_patches = _Patches()


def instrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Make spans and measurements for the requests of all clients of this process, of both kinds, from now on.

    A second call replaces the providers.

    Args:
        tracer_provider: makes the spans. Default: the global one of `opentelemetry.trace`.
        meter_provider: makes the histograms and the counter. Default: the global one of `opentelemetry.metrics`.

    """
    _patches.apply(_Telemetry(tracer_provider, meter_provider))


def uninstrument() -> None:
    """Make no spans and measurements for new requests. Those of requests that wait or are held are completed."""
    _patches.undo()
