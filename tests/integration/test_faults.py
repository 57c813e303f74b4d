"""Every real fault, a few times each: the short form of `make soak-faults`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from faults import __main__ as soak
from faults.figures import BEGIN, END, Figures
from faults.redis_fails import stop_redis
from faults.scenarios import SCENARIOS, Scenario
from faults.servers_end import kill_with_many
from faults.world import World
from servers import WAIT_S

TIMES = {
    "kill-alone": 2,
    "kill-leader": 1,
    "kill-leader-of-3": 1,
    "kill-and-restart": 1,
    "resign": 1,
    "stop-leader": 1,
    "kill-redis": 2,
    "stop-redis": 1,
    "cut-clients": 33,
    "cut-redis": 18,
    "cut-and-kill": 1,
    "kill-master": 1,
    "kill-lagging": 1,
    "stop-master": 1,
    "isolate-master": 1,
    "hand-over": 1,
    "move-slot": 2,
    "kill-member": 1,
    "stop-member": 1,
    "kill-with-many": 1,
}
SHORTER = {"stop-redis": partial(stop_redis, stop_s=1.0), "kill-with-many": partial(kill_with_many, many=4_000)}
LEASE_S = 0.5
LONGER_S = {"stop-leader": 3.0, "kill-with-many": 3.0}
"""The lease where nobody else may lose it but who is to."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
async def test_promises_are_kept(scenario: Scenario) -> None:
    short = replace(scenario, run=SHORTER.get(scenario.name, scenario.run))
    lease_s = LONGER_S.get(scenario.name, LEASE_S)
    found = await short.play("short", TIMES[scenario.name], clients=8, library=2, lease_s=lease_s, stuck_s=WAIT_S)
    assert found.faults == TIMES[scenario.name] == len(found.away_s)
    assert found.increments > 0


async def lose_an_update(w: World, found: Figures, times: int) -> None:
    found.faults = times
    await w.calm()
    w.watch.store.accepted["counters/1"] += 1  # not by its value, which a client may be about to write


def test_a_promise_that_is_broken_is_told_with_all_that_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nas before\n{END}\n")
    monkeypatch.setattr(soak, "SCENARIOS", [Scenario("made-up", "", 1, lose_an_update, {"servers": 1})])
    monkeypatch.setattr(sys, "argv", ["faults", "--seed", "7", "--clients", "2", "--library", "1", "--page", str(page)])
    assert soak.main() == 1
    said = capsys.readouterr().out
    assert "increments were acknowledged" in said
    assert "holds counters/1" in said
    assert 'make soak-faults FAULTS="made-up --times 1 --seed 7 --lease 1 --clients 2 --library 1"' in said
    assert "as before" in page.read_text()


def test_turns_are_taken_with_other_seeds_and_added_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    rounds = 0

    async def nothing(w: World, found: Figures, times: int) -> None:
        nonlocal rounds
        rounds += 1
        await w.calm()
        found.faults = times

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
    said = capsys.readouterr().out
    assert "made-up --times 2 --seed 7 " in said
    assert "made-up --times 2 --seed 7-1 " in said
    assert "| a title | 4 |" in page.read_text()
    assert json.loads(page.with_name("all").read_text())[0]["faults"] == 4
