"""The messages of `genie-ledger run` about its runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from genie_ledger import DatabaseFailed, Ledger, TimeoutRun
from genie_ledger.cli import main
from genie_ledger.cli.run import RunOptions, StdoutDelivery, _Service

OPTIONS = RunOptions(
    url="sqlite:///none.db",
    ledger=Ledger(),
    every=15,
    batch=10,
    longest_transaction=60,
    on_expired=None,
    once=False,
    lock=None,
    progress_every=5,
    host="127.0.0.1",
    port=7077,
    namespace=None,
)


@pytest.fixture(autouse=True)
def running_command() -> Iterator[None]:
    with main.make_context("genie-ledger", [], resilient_parsing=True):
        yield


def timeout_run(*interval: int, expired: int = 0, lagging: bool = False) -> TimeoutRun:
    return TimeoutRun(interval=interval, cleaned=0, inserted=0, expired=expired, rejected=0, lagging=lagging)  # type: ignore[arg-type]


def messages(
    capsys: pytest.CaptureFixture[str], *outcomes: TimeoutRun | Exception | None, progress_every: int = 5
) -> list[str]:
    service = _Service(
        replace(OPTIONS, progress_every=progress_every), StdoutDelivery(), initial_last_change_id=25, task=None
    )
    for outcome in outcomes:
        service._on_run(outcome)
    return capsys.readouterr().err.splitlines()


def test_a_repeated_error_is_printed_again_only_after_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    error, success = DatabaseFailed("unavailable"), timeout_run(5, 5)
    outcomes = (error, error, error, DatabaseFailed("locked"), error, success, error)
    assert messages(capsys, *outcomes) == [
        "genie-ledger: unavailable",
        "genie-ledger: locked",
        "genie-ledger: unavailable",
        "genie-ledger: unavailable",
    ]


@pytest.mark.parametrize(("lock", "name"), [(None, "run lock"), ("a", "lock exclusive:timeout-handler/a")])
def test_a_wait_for_the_run_lock_is_printed_once_a_minute(
    capsys: pytest.CaptureFixture[str], lock: str | None, name: str
) -> None:
    start = datetime(2026, 1, 31, 12, tzinfo=UTC)
    service = _Service(replace(OPTIONS, lock=lock), StdoutDelivery(), task=None)

    def outcomes(*after_s: int) -> None:
        for seconds in after_s:
            service.now = lambda: start + timedelta(seconds=seconds)  # noqa: B023 - called before the next iteration
            service._on_run(None)

    outcomes(0, 15, 59, 60, 61)
    service._on_run(timeout_run(5, 5))
    service._on_run(timeout_run(5, 5))
    outcomes(90)
    service._on_run(DatabaseFailed("unavailable"))
    outcomes(95)
    assert capsys.readouterr().err.splitlines() == [
        f"genie-ledger: {name} is held by another replica, waiting since 2026-01-31T12:00:00Z",
        f"genie-ledger: {name} is held by another replica, waiting since 2026-01-31T12:00:00Z",
        f"genie-ledger: {name} acquired after 61 s",
        f"genie-ledger: {name} is held by another replica, waiting since 2026-01-31T12:01:30Z",
        "genie-ledger: unavailable",
        f"genie-ledger: {name} is held by another replica, waiting since 2026-01-31T12:01:35Z",
    ]


def test_progress_is_printed_while_the_handler_lags(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        timeout_run(0, 10, lagging=True),
        timeout_run(10, 20, lagging=True),
        timeout_run(20, 30, expired=1200),
        timeout_run(30, 31),
    ]
    assert messages(capsys, *runs) == [
        "genie-ledger: read up to state change 10 of 25",
        "genie-ledger: read up to state change 20 of 25",
        "genie-ledger: read up to state change 30",
        "genie-ledger: 1,200 expired",
    ]


def test_progress_is_printed_once_per_progress_interval(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [timeout_run(first, first + 4, lagging=first < 20) for first in range(0, 24, 4)]
    assert messages(capsys, *runs, progress_every=8) == [
        "genie-ledger: read up to state change 8 of 25",
        "genie-ledger: read up to state change 16 of 25",
        "genie-ledger: read up to state change 24 of 25",
    ]
    assert messages(capsys, *runs, progress_every=100) == ["genie-ledger: read up to state change 24 of 25"]
