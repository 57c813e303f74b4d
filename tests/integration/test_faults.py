"""Short runs of all scenarios of `make soak-faults`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from faults import __main__ as soak
from faults.environment import Environment
from faults.redis_failures import lose_last_second, stop_redis
from faults.results import BEGIN, END, Results
from faults.scenarios import SCENARIOS, Scenario
from faults.server_failures import kill_with_many
from support.processes.servers import WAIT_S

TIMES = {
    "kill-alone": 2,
    "kill-leader": 1,
    "kill-leader-of-3": 1,
    "kill-and-restart": 1,
    "resign": 1,
    "stop-leader": 1,
    "kill-redis": 2,
    "lose-second": 2,
    "stop-redis": 1,
    "cut-clients": 33,
    "cut-redis": 18,
    "cut-and-kill": 1,
    "kill-primary": 1,
    "kill-lagging": 1,
    "stop-primary": 1,
    "isolate-primary": 1,
    "hand-over": 1,
    "move-slot": 2,
    "kill-member": 1,
    "stop-member": 1,
    "kill-with-many": 1,
}
SHORT_RUNS = {
    "lose-second": partial(lose_last_second, many=2_000),
    "stop-redis": partial(stop_redis, stop_s=1.0),
    "kill-with-many": partial(kill_with_many, many=4_000),
}
LEASE_S = 0.5
LONG_LEASES_S = {"stop-leader": 3.0, "kill-with-many": 3.0}
"""Longer leases for scenarios in which only the faulty server may lose leadership."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
async def test_a_scenario_reveals_no_violation(scenario: Scenario) -> None:
    short = replace(scenario, run=SHORT_RUNS.get(scenario.name, scenario.run))
    lease_s = LONG_LEASES_S.get(scenario.name, LEASE_S)
    results = await short.play(
        "short", TIMES[scenario.name], clients=8, library=2, lease_s=lease_s, progress_timeout_s=WAIT_S
    )
    assert results.faults == TIMES[scenario.name] == len(results.grant_delays_s)
    assert results.increments > 0


async def lose_update(env: Environment, results: Results, times: int) -> None:
    results.faults = times
    await env.settle()
    env.checker.store.accepted["counters/1"] += 1  # not the value, which a client may be about to overwrite


def test_a_violation_is_reported_with_the_history_and_how_to_reproduce_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nas before\n{END}\n")
    monkeypatch.setattr(soak, "SCENARIOS", [Scenario("made-up", "", 1, lose_update, {"servers": 1})])
    monkeypatch.setattr(sys, "argv", ["faults", "--seed", "7", "--clients", "2", "--library", "1", "--page", str(page)])
    assert soak.main() == 1
    output = capsys.readouterr().out
    assert "increments were acknowledged" in output
    assert "holds counters/1" in output
    assert 'make soak-faults FAULTS="made-up --times 1 --seed 7 --lease 1 --clients 2 --library 1"' in output
    assert "as before" in page.read_text()


def test_rounds_use_different_seeds_and_their_results_are_added(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    rounds = 0

    async def nothing(env: Environment, results: Results, times: int) -> None:
        nonlocal rounds
        rounds += 1
        await env.settle()
        results.faults = times

    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nas before\n{END}\n")
    monkeypatch.setattr(soak, "SCENARIOS", [Scenario("made-up", "a title", 20, nothing, {"servers": 1})])
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: 0 if rounds < 2 else 600))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "faults",
            "--seed",
            "7",
            "--seconds",
            "2.5",
            "--clients",
            "2",
            "--library",
            "0",
            "--page",
            str(page),
            "--json",
            str(page.with_name("all")),
        ],
    )
    assert soak.main() == 0
    output = capsys.readouterr().out
    assert "made-up --times 2 --seed 7 " in output
    assert "made-up --times 2 --seed 7-1 " in output
    assert "| a title | 4 |" in page.read_text()
    assert json.loads(page.with_name("all").read_text())[0]["faults"] == 4
