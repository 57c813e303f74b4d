"""A short search for expensive commands, and tests that it detects defects."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from fuzz import cost_server, cost_steps, costs
from fuzz.cost_steps import BURST, Step
from genie.server import dispatcher
from genie.server.connection import Connection


@pytest.fixture(autouse=True)
def without_log() -> Iterator[None]:
    """Drop the log, which would count as memory."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


def burst(**arguments: Any) -> Step:
    """Return a burst of plain requests, with these arguments."""
    plain: Step = {name: values[0] for name, values in BURST.items()}
    different = {"do": "send", "client": 0, "settle": True, "names": 100_000, "stride": 1, "timeout": 20_000}
    return plain | different | arguments


def step(do: str, **arguments: Any) -> Step:
    return {"do": do, "client": 0, "settle": True} | arguments


LOCKS_OF_A_LOST_CLIENT = [burst(count=2_000, disconnect="release"), step("drop")]


def play(steps: list[Step], *, durable: bool = False) -> costs.Search:
    search = costs.Search()
    costs.try_sequence(search, steps, durable=durable, timed=False)
    return search


def test_a_short_search_reveals_no_failure_and_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_steps, "MAX_BURST_BYTES", 20_000)
    first, second = (costs.run(3, 3, 1e9, timed=False) for _ in range(2))
    assert not first.failures, first.failures
    values = [{cell: (found.value, found.steps) for cell, found in each.corpus.items()} for each in (first, second)]
    work = [{cell: value for cell, value in each.items() if cell[0].startswith("work")} for each in values]
    assert work[0] == work[1]
    assert len(work[0]) > 4


@pytest.mark.parametrize("durable", [False, True])
def test_an_end_without_slices_is_detected(monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    monkeypatch.setattr(costs, "MAX_WORK", 500_000)
    monkeypatch.setattr(cost_server, "READ_BYTES", 8 << 10)
    monkeypatch.setattr(dispatcher, "MAX_ENDED_LOCKS", 100)
    assert not play(LOCKS_OF_A_LOST_CLIENT, durable=durable).failures
    monkeypatch.setattr(dispatcher, "MAX_ENDED_LOCKS", 1_000_000)
    assert ("work", "drop") in play(LOCKS_OF_A_LOST_CLIENT, durable=durable).failures


def test_a_batch_that_ends_expired_requests_is_not_a_second_one_in_an_iteration() -> None:
    """Each request searches for a deadlock in very many queues. Meanwhile the locks of earlier requests expire."""
    steps = [burst(count=13, width=1024, first=1_000, transaction="few", timeout=100)]
    search = costs.Search()
    costs._record_work(search, cost_server.play(steps), steps, durable=False)
    assert search.corpus["work", "request"].value > costs.MAX_WORK / 2
    assert not search.failures, search.failures


def test_an_iteration_ends_one_slice_of_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_ENDED_LOCKS", 300)
    steps = [burst(count=900, names=100, units="1/1", note=250, disconnect="release"), step("drop")]
    search = play(steps, durable=True)
    assert 200_000 < search.corpus["work", "drop"].value < 600_000


def test_a_list_that_grows_with_each_connection_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step("storm", count=400, session=None, request=True)]
    assert not play(steps).failures
    leak: list[object] = []
    original = Connection.connection_made

    def connection_made(connection: Connection, transport: Any) -> None:
        leak.append([transport.peer])
        original(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    assert ("residual", "end") in play(steps).failures


def test_an_endless_iteration_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_server, "MAX_COUNTED", 20_000)
    monkeypatch.setattr(costs, "MAX_WORK", 20_000)
    search = play([burst(count=1_000)])
    assert ("work", "request") in search.failures
    assert not search.corpus


def test_a_failure_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MAX_WORK", 10_000)
    search = play([step("stall"), burst(count=200), step("wait", ms=1)])
    cell = ("work", "request")
    smallest = costs.shrink(cell, search.failures[cell])
    assert [each["do"] for each in smallest.steps] == ["send"]
    assert smallest.steps[0]["count"] < 200


def test_a_hello_resumes_its_session() -> None:
    hello = step("hello", session=0, lasts=10_000, quiet=False)
    locks = burst(count=300, disconnect="release")
    plain, resumed = play([hello, locks]), play([hello, locks, hello | {"client": 1}])
    assert resumed.corpus["work", "hello"].value > 5 * plain.corpus["work", "hello"].value


def test_a_step_with_too_much_work_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_server, "MAX_SEQUENCE_WORK", 100_000)
    search = play([burst(count=3_000), step("wait", ms=1)])
    assert ("work", "request") in search.corpus
    assert ("work", "wait") not in search.corpus
    assert not search.failures, search.failures
