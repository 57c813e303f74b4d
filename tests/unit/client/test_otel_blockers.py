"""The blockers in the `locked` of a request that had to wait: ignored by clients, and shown by spans with `genie.otel`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from genie import errors, otel
from genie.client.commands import Request, RequestState
from genie.client.session import ClientSession
from genie.otel import TracedRequest
from support.network.scripted_server import connected_session, locked, reconnect, send_request

HOLDER = f"00-{'a' * 32}-{'b' * 16}-01"
BLOCKERS = [
    {
        "id": 90,
        "resource": "a",
        "mode": "exclusive",
        "state": "held",
        "since": 1_790_000_000_500,
        "transactionName": "t",
        "note": "cron",
        "traceparent": HOLDER,
    },
    {"id": 91, "resource": "a", "mode": "shared", "state": "queued", "since": 1_790_000_001_000},
]


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(tracer_provider=provider, meter_provider=NoOpMeterProvider())
    yield exporter
    otel.uninstrument()


def traced_request(session: ClientSession) -> TracedRequest:
    request = send_request(session, transaction_timeout=10)
    assert isinstance(request, TracedRequest)
    request.start_wait(None)
    return request


def finished_wait(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "genie.wait"]
    return span


def events(span: ReadableSpan) -> list[dict[str, Any]]:
    assert {event.name for event in span.events} <= {"genie.blocker"}
    return [dict(event.attributes or {}) for event in span.events]


def links(span: ReadableSpan) -> list[tuple[str, str]]:
    return [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links]


@pytest.mark.parametrize("blockers", [BLOCKERS, [], None])
def test_a_client_without_instrumentation_ignores_the_blockers(blockers: object) -> None:
    session = connected_session()
    request = send_request(session)
    assert type(request) is Request
    assert session.receive_data(locked(101, "1", blockers=blockers, blockersTotal=12), 0.0) == [(request, None, None)]
    assert (request.id, request.fence, request.state) == (101, 7, RequestState.HELD)


def test_the_wait_of_a_granted_request_shows_its_blockers(exporter: InMemorySpanExporter) -> None:
    session = connected_session()
    request = traced_request(session)
    assert session.receive_data(locked(101, "1", blockers=BLOCKERS, blockersTotal=2), 0.0) == [(request, None, None)]
    wait = finished_wait(exporter)
    assert (wait.attributes or {})["genie.outcome"] == "granted"
    assert wait.status.is_unset
    assert events(wait) == [
        {
            "genie.request.id": 90,
            "genie.resource": "a",
            "genie.mode": "exclusive",
            "genie.state": "held",
            "genie.since": 1_790_000_000.5,
            "genie.transaction": "t",
            "genie.note": "cron",
            "genie.trace_id": "a" * 32,
        },
        {
            "genie.request.id": 91,
            "genie.resource": "a",
            "genie.mode": "shared",
            "genie.state": "queued",
            "genie.since": 1_790_000_001.0,
        },
    ]
    assert links(wait) == [("a" * 32, "b" * 16)]
    assert dict(wait.links[0].attributes or {}) == {
        "genie.request.id": 90,
        "genie.resource": "a",
        "genie.state": "held",
    }


def test_an_invalid_trace_context_of_a_blocker_gives_no_link(exporter: InMemorySpanExporter) -> None:
    session = connected_session()
    traced_request(session)
    session.receive_data(locked(101, "1", blockers=[{**BLOCKERS[0], "traceparent": "00-a"}]), 0.0)
    wait = finished_wait(exporter)
    assert [event["genie.request.id"] for event in events(wait)] == [90]
    assert "genie.trace_id" not in events(wait)[0]
    assert links(wait) == []


def test_a_grant_without_blockers_has_no_events(exporter: InMemorySpanExporter) -> None:
    session = connected_session()
    traced_request(session)
    session.receive_data(locked(101, "1"), 0.0)
    wait = finished_wait(exporter)
    assert (events(wait), links(wait)) == ([], [])


def test_a_grant_that_is_extended_first_keeps_its_blockers(exporter: InMemorySpanExporter) -> None:
    """A grant after a long wait is extended before it counts, and that may fail: the wait shows its blockers anyway."""
    session = connected_session()
    request = traced_request(session)
    assert session.receive_data(locked(101, "1", blockers=BLOCKERS), 5.0) == []
    assert request.state is RequestState.WAITING
    assert exporter.get_finished_spans() == ()
    request.fail_wait(errors.LockLost("lock 101 is lost", id=101))
    wait = finished_wait(exporter)
    assert (wait.attributes or {})["genie.outcome"] == "lost"
    assert links(wait) == [("a" * 32, "b" * 16)]


def test_blockers_after_the_end_of_the_wait_are_ignored(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller was cancelled, and `locked` arrives before the answer to the release."""
    session = connected_session()
    request = traced_request(session)
    session.requests.release(request, 0.0)
    request.fail_wait(errors.ConnectionLost("the caller gave up"))
    assert session.receive_data(locked(101, "1", blockers=BLOCKERS), 0.0) == []
    assert events(finished_wait(exporter)) == []
    assert caplog.records == []  # the SDK warns of changes of an ended span


def test_a_request_that_was_made_before_the_instrumentation_is_granted() -> None:
    session = connected_session()
    request = send_request(session)
    otel.instrument(tracer_provider=TracerProvider(), meter_provider=NoOpMeterProvider())
    try:
        data = locked(101, "1", blockers=BLOCKERS) + locked(102, "unknown", blockers=BLOCKERS)
        assert session.receive_data(data, 0.0) == [(request, None, None)]
    finally:
        otel.uninstrument()
    assert b'"release","payload":{"id":102' in session.data_to_send()


def test_a_lock_that_a_resumption_repeats_has_no_blockers(exporter: InMemorySpanExporter) -> None:
    session = connected_session()
    request = traced_request(session)
    session.data_to_send()
    assert reconnect(session, locked(101, "1", expiresIn=10_000)) == [(request, None, None)]
    assert events(finished_wait(exporter)) == []
