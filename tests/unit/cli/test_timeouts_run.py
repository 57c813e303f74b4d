"""What `genie timeouts run` says of its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from genie.cli.timeouts.run import RunOptions, ToStdout, _Service
from genie.timeouts import DatabaseFailed, Ledger, TimeoutRun

ORDER = RunOptions(
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


def a_run(*interval: int, expired: int = 0, behind: bool = False) -> TimeoutRun:
    return TimeoutRun(interval=interval, cleaned=0, inserted=0, expired=expired, rejected=0, lagging=behind)  # type: ignore[arg-type]


def said(
    capsys: pytest.CaptureFixture[str], *came: TimeoutRun | Exception | None, progress_every: int = 5
) -> list[str]:
    service = _Service(replace(ORDER, progress_every=progress_every), ToStdout(), greatest=25, task=None)
    for one in came:
        service._on_run(one)
    return capsys.readouterr().err.splitlines()


def test_the_same_trouble_is_said_again_only_behind_a_run_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    away, back = DatabaseFailed("away"), a_run(5, 5)
    came = (away, away, None, away, DatabaseFailed("locked"), away, back, away)
    assert said(capsys, *came) == ["genie: away", "genie: locked", "genie: away", "genie: away"]


def test_how_far_it_has_come_is_said_while_it_is_behind(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [a_run(0, 10, behind=True), a_run(10, 20, behind=True), a_run(20, 30, expired=1200), a_run(30, 31)]
    assert said(capsys, *runs) == [
        "genie: read up to state change 10 of 25",
        "genie: read up to state change 20 of 25",
        "genie: read up to state change 30",
        "genie: 1,200 expired",
    ]


def test_how_far_it_has_come_is_said_each_time_that_so_many_more_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [a_run(first, first + 4, behind=first < 20) for first in range(0, 24, 4)]
    assert said(capsys, *runs, progress_every=8) == [
        "genie: read up to state change 8 of 25",
        "genie: read up to state change 16 of 25",
        "genie: read up to state change 24 of 25",
    ]
    assert said(capsys, *runs, progress_every=100) == ["genie: read up to state change 24 of 25"]
