"""Timeouts as a number of seconds or as a timedelta, and the warning of a number that may be meant as milliseconds."""

from __future__ import annotations

import warnings
from datetime import timedelta
from types import ModuleType

import orjson
import pytest

from genie.client import aio, durations, sync
from genie.client.commands import make_any_request, make_request
from genie.client.durations import to_seconds


@pytest.fixture(autouse=True)
def no_warning_was_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "_warned_names", set())


def test_a_request_takes_timedeltas() -> None:
    request = make_request(
        "r", ["a"], queue_timeout=timedelta(milliseconds=1_500), transaction_timeout=timedelta(hours=3)
    )
    payload = orjson.loads(request.line)["payload"]
    assert (payload["queueTimeout"], payload["transactionTimeout"]) == (1_500, 10_800_000)
    assert (request.queue_timeout, request.transaction_timeout) == (1.5, 10_800.0)
    chosen = make_any_request("r", ["a"], 1, transaction_timeout=timedelta(minutes=1))
    assert (orjson.loads(chosen.line)["payload"]["transactionTimeout"], chosen.transaction_timeout) == (60_000, 60.0)


@pytest.mark.parametrize("module", [aio, sync])
def test_connect_takes_timedeltas(module: ModuleType) -> None:
    client = module.connect(
        connect_timeout=timedelta(seconds=3),
        response_timeout=timedelta(seconds=2),
        session_timeout=timedelta(minutes=1),
    )
    connection = client._connection if module is aio else client._connection.aio
    session = connection.session
    timeouts = (connection.connect_timeout, session.calls.response_timeout, session.requests.lease.timeout_s)
    assert timeouts == (3.0, 2.0, 60.0)


def test_a_number_that_may_be_milliseconds_is_warned_of_once_and_both_units_are_named() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for timeout in (60_000, 70_000):
            make_request("r", ["a"], transaction_timeout=timeout)
    (warning,) = found
    assert str(warning.message).startswith("transaction_timeout=60000 is in seconds, that is 16:40:00.")
    assert "milliseconds are meant, write transaction_timeout=60;" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("duration", [9_999, 10.0, timedelta(days=20), timedelta(seconds=10_000)])
def test_other_durations_are_not_warned_of(duration: float | timedelta) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_seconds(duration, "queue_timeout")


def test_a_number_of_10_000_seconds_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"queue_timeout=10000 is in seconds, that is 2:46:40"):
        to_seconds(10_000, "queue_timeout")
