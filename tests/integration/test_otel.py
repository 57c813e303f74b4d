"""The spans and measurements of both clients: `genie.otel`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode

from genie import Deadlock, LockLost, QueueTimeout, connect, otel, sync
from support.processes.servers import WAIT_S, Genie


class Telemetry:
    """Spans and measurements in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self.reader])

    def span(self, name: str, **attributes: Any) -> ReadableSpan:
        """Return the only ended span with this name and these attributes of `genie.`."""
        wanted = {f"genie.{key}": value for key, value in attributes.items()}.items()
        spans = self.exporter.get_finished_spans()
        (span,) = [span for span in spans if span.name == name and wanted <= dict(span.attributes or {}).items()]
        return span

    def counts(self, name: str) -> dict[Any, int]:
        """Return the counts of a histogram by outcome."""
        (resource,) = self.reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        (metric,) = [metric for metric in scope.metrics if metric.name == name]
        points: list[Any] = list(metric.data.data_points)
        return {point.attributes["genie.outcome"]: point.count for point in points}


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    otel.instrument(tracer_provider=made.tracer_provider, meter_provider=made.meter_provider)
    yield made
    otel.uninstrument()


def outcome_of(span: ReadableSpan) -> Any:
    return (span.attributes or {})["genie.outcome"]


def check_blocked_request(telemetry: Telemetry, genie: Genie, resource: str, caller: Any, holder: Any) -> None:
    """Check the spans of a request with a queue timeout, and that they lead to the trace of the holder."""
    blocked = telemetry.span("genie.wait", outcome="queue-timeout")
    wait = telemetry.span("genie.wait", outcome="granted")
    hold = telemetry.span("genie.hold")
    assert blocked.attributes is not None
    assert wait.attributes is not None
    assert hold.attributes is not None
    assert (blocked.kind, blocked.context.trace_id) == (SpanKind.CLIENT, caller.trace_id)
    assert blocked.attributes["error.type"] == "genie.errors.QueueTimeout"
    assert blocked.status.status_code is StatusCode.ERROR
    assert (blocked.attributes["server.address"], blocked.attributes["server.port"]) == genie.address
    assert blocked.attributes["genie.resources"] == (f"shared:{resource}",)
    assert blocked.attributes["genie.mode"] == "shared"
    assert blocked.attributes["genie.transaction"] == "t2"
    waited = blocked.attributes["genie.waited"]
    assert isinstance(waited, float)
    assert 0.01 <= waited < WAIT_S
    (link,) = blocked.links
    assert (link.context.trace_id, link.context.span_id) == (wait.context.trace_id, wait.context.span_id)
    assert link.context.trace_id == holder.trace_id
    (event,) = blocked.events
    assert event.attributes is not None
    assert event.name == "genie.blocker"
    assert {key: event.attributes[f"genie.{key}"] for key in ("mode", "state", "resource", "transaction", "note")} == {
        "mode": "exclusive",
        "state": "held",
        "resource": resource,
        "transaction": "t1",
        "note": "cron",
    }
    assert hold.parent is not None
    assert hold.parent.span_id == wait.context.span_id
    assert hold.attributes["genie.fence"] == wait.attributes["genie.fence"]
    assert hold.attributes["genie.request.id"] == event.attributes["genie.request.id"]
    assert (outcome_of(hold), hold.status.status_code) == ("released", StatusCode.UNSET)
    assert telemetry.counts("genie.client.wait.duration") == {"granted": 1, "queue-timeout": 1}
    assert telemetry.counts("genie.client.hold.duration") == {"released": 1}


async def test_a_blocked_task_has_a_link_to_the_trace_that_holds_the_lock(genie: Genie, telemetry: Telemetry) -> None:
    tracer = telemetry.tracer_provider.get_tracer("test")
    async with connect(*genie.address) as client, connect(*genie.address) as other:
        with tracer.start_as_current_span("holder") as holder:
            lock = await client.acquire("otel/a", transaction="t1", note="cron")
        with tracer.start_as_current_span("caller") as caller, pytest.raises(QueueTimeout) as caught:
            await other.acquire("shared:otel/a", transaction="t2", queue_timeout=0.01)
        (row,) = (await other.inspect(resource="otel/a")).holders
        assert row.traceparent is not None
        assert row.traceparent == caught.value.blockers[0].traceparent
        assert f"{holder.get_span_context().trace_id:032x}" in row.traceparent
        await lock.release()
    check_blocked_request(telemetry, genie, "otel/a", caller.get_span_context(), holder.get_span_context())


def test_a_blocked_thread_has_a_link_to_the_trace_that_holds_the_lock(genie: Genie, telemetry: Telemetry) -> None:
    tracer = telemetry.tracer_provider.get_tracer("test")
    with sync.connect(*genie.address) as client, sync.connect(*genie.address) as other:
        with tracer.start_as_current_span("holder") as holder:
            lock = client.acquire("otel/b", transaction="t1", note="cron")
        with tracer.start_as_current_span("caller") as caller, pytest.raises(QueueTimeout):
            other.acquire("shared:otel/b", transaction="t2", queue_timeout=0.01)
        lock.release()
    check_blocked_request(telemetry, genie, "otel/b", caller.get_span_context(), holder.get_span_context())


def check_granted_wait(telemetry: Telemetry, resource: str, caller: Any, holder: Any) -> None:
    """Check that the wait of a granted request leads to the trace of the request that held the lock."""
    wait = telemetry.span("genie.wait", outcome="granted", transaction="t2")
    held = telemetry.span("genie.wait", outcome="granted", transaction="t1")
    assert wait.attributes is not None
    assert wait.context.trace_id == caller.trace_id
    assert wait.status.status_code is StatusCode.UNSET
    (link,) = wait.links
    assert (link.context.trace_id, link.context.span_id) == (held.context.trace_id, held.context.span_id)
    assert link.context.trace_id == holder.trace_id
    assert dict(link.attributes or {})["genie.state"] == "held"
    (event,) = wait.events
    attributes = dict(event.attributes or {})
    assert event.name == "genie.blocker"
    assert attributes["genie.resource"] == resource
    assert (attributes["genie.mode"], attributes["genie.transaction"], attributes["genie.note"]) == (
        "exclusive",
        "t1",
        "cron",
    )
    assert attributes["genie.request.id"] == (held.attributes or {})["genie.request.id"]
    assert (held.links, held.events) == ((), ())  # it was granted immediately
    assert outcome_of(telemetry.span("genie.hold", transaction="t2")) == "released"


async def test_a_task_that_waited_and_was_granted_has_a_link_to_the_holder(genie: Genie, telemetry: Telemetry) -> None:
    tracer = telemetry.tracer_provider.get_tracer("test")
    async with connect(*genie.address) as client, connect(*genie.address) as other:
        with tracer.start_as_current_span("holder") as holder:
            lock = await client.acquire("otel/e", transaction="t1", note="cron")
        with tracer.start_as_current_span("caller") as caller:
            waiting = asyncio.create_task(other.acquire("shared:otel/e", transaction="t2"))
            while not (await client.inspect(resource="otel/e")).queue_total:
                pass
        await lock.release()
        await (await waiting).release()
    check_granted_wait(telemetry, "otel/e", caller.get_span_context(), holder.get_span_context())


def test_a_thread_that_waited_and_was_granted_has_a_link_to_the_holder(genie: Genie, telemetry: Telemetry) -> None:
    tracer = telemetry.tracer_provider.get_tracer("test")
    with sync.connect(*genie.address) as client, sync.connect(*genie.address) as other, ThreadPoolExecutor() as pool:
        with tracer.start_as_current_span("holder") as holder:
            lock = client.acquire("otel/f", transaction="t1", note="cron")

        def wait() -> Any:
            with tracer.start_as_current_span("caller") as caller, other.lock("shared:otel/f", transaction="t2"):
                return caller.get_span_context()

        caller = pool.submit(wait)
        while not client.inspect(resource="otel/f").queue_total:
            pass
        lock.release()
        check_granted_wait(telemetry, "otel/f", caller.result(WAIT_S), holder.get_span_context())


async def test_a_victim_of_a_deadlock_has_a_link_to_the_other_transaction(genie: Genie, telemetry: Telemetry) -> None:
    async with connect(*genie.address) as client, connect(*genie.address) as other:
        locks = [await client.acquire("otel/c", transaction="tc"), await other.acquire("otel/d", transaction="td")]
        waiting = client.lock("otel/d", transaction="tc")

        task = asyncio.create_task(waiting.__aenter__())
        while not (await other.inspect(resource="otel/d")).queue_total:
            pass
        with pytest.raises(Deadlock):
            await other.acquire("otel/c", transaction="td")
        await locks[1].release()
        locks[1] = await task
        for lock in locks:
            await lock.release()
    victim = telemetry.span("genie.wait", outcome="deadlock")
    (link,) = victim.links  # its own step of the cycle has none
    (waiter,) = [
        span
        for span in telemetry.exporter.get_finished_spans()
        if span.name == "genie.wait" and span.context.span_id == link.context.span_id
    ]
    assert waiter.attributes is not None
    assert (waiter.attributes["genie.transaction"], waiter.attributes["genie.resources"]) == (
        "tc",
        ("exclusive:otel/d",),
    )
    assert [event.name for event in victim.events] == ["genie.blocker"] * 2


async def test_the_other_ends_of_a_wait_and_of_a_hold(genie: Genie, telemetry: Telemetry) -> None:
    async with connect(*genie.address) as client, connect(*genie.address) as other:
        lock = await client.acquire("otel/lost", transaction_timeout=0.02)
        await lock.lost.wait()
        with pytest.raises(LockLost):
            await lock.extend(1)
        lost = telemetry.span("genie.hold", outcome="transaction-timeout")
        assert (lost.attributes or {})["error.type"] == "genie.errors.TransactionTimeout"
        assert lost.status.status_code is StatusCode.ERROR

        detached = (await client.acquire("otel/detached")).detach()
        telemetry.span("genie.hold", outcome="detached")
        assert await other.try_acquire("otel/detached") is None
        tried = telemetry.span("genie.wait", outcome="queue-timeout")  # the expected answer of a try-lock is no error
        assert (tried.status.status_code, "error.type" in (tried.attributes or {})) == (StatusCode.UNSET, False)
        assert len(tried.links) == 1
        kept = await client.acquire("otel/kept")
    assert kept.held
    telemetry.span("genie.hold", outcome="kept")
    otel.uninstrument()
    async with connect(*genie.address) as client:
        before = len(telemetry.exporter.get_finished_spans())
        assert [await client.release(id_) for id_ in (detached, kept.id)] == ["success"] * 2
        async with client.lock("otel/off"):
            assert (await client.inspect(resource="otel/off")).holders[0].traceparent is None
        assert len(telemetry.exporter.get_finished_spans()) == before


@pytest.mark.parametrize("provider", [NoOpTracerProvider(), TracerProvider(ALWAYS_OFF)], ids=["none", "unsampled"])
async def test_without_a_sampled_trace_no_trace_context_is_sent(
    genie: Genie, telemetry: Telemetry, provider: Any
) -> None:
    otel.instrument(tracer_provider=provider, meter_provider=telemetry.meter_provider)
    assert not trace.get_current_span().get_span_context().is_valid
    async with connect(*genie.address) as client, client.lock("otel/none"):
        assert (await client.inspect(resource="otel/none")).holders[0].traceparent is None
    assert telemetry.counts("genie.client.hold.duration") == {"released": 1}
