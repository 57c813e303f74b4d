from __future__ import annotations

from itertools import islice

import pytest
from click.testing import CliRunner

from simulator import soak
from simulator.scenario import (
    FIRST_ANY_OF_SEED,
    FIRST_BELIEF_SEED,
    FIRST_CRASH_SEED,
    FIRST_LOCK_KINDS_SEED,
    FIRST_REPLICATED_SEED,
)


class FakeHistory:
    def tail(self, *_: object, **__: object) -> str:
        return "a history"


class FakeCluster:
    history = FakeHistory()


@pytest.fixture
def seeds_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seeds: list[int] = []

    def run(seed: int) -> tuple[FakeCluster, list[str]]:
        seeds.append(seed)
        return FakeCluster(), ["something went wrong"] if seed == FIRST_ANY_OF_SEED + 1 else []

    monkeypatch.setattr(soak, "run", run)
    return seeds


def test_without_a_first_seed_all_kinds_of_scenarios_alternate(seeds_run: list[int]) -> None:
    result = CliRunner().invoke(soak.main, ["--seeds", "12"])
    assert seeds_run == [
        1,
        FIRST_ANY_OF_SEED,
        FIRST_REPLICATED_SEED,
        FIRST_BELIEF_SEED,
        FIRST_LOCK_KINDS_SEED,
        FIRST_CRASH_SEED,
        2,
        FIRST_ANY_OF_SEED + 1,
        FIRST_REPLICATED_SEED + 1,
        FIRST_BELIEF_SEED + 1,
        FIRST_LOCK_KINDS_SEED + 1,
        FIRST_CRASH_SEED + 1,
    ]
    assert result.exit_code == 1
    assert f"reproduce: python -m simulator.soak --seed {FIRST_ANY_OF_SEED + 1}\n" in result.output
    assert list(islice(soak.seeds_of_all_kinds(), 13))[-1] == 3


def test_with_a_first_seed_seeds_are_consecutive(seeds_run: list[int]) -> None:
    assert CliRunner().invoke(soak.main, ["--first", "7", "--seeds", "3"]).exit_code == 0
    assert seeds_run == [7, 8, 9]


def test_with_stop_it_ends_at_the_first_failure(seeds_run: list[int]) -> None:
    assert CliRunner().invoke(soak.main, ["--stop", "--first", str(FIRST_ANY_OF_SEED), "--seeds", "10"]).exit_code == 1
    assert seeds_run == [FIRST_ANY_OF_SEED, FIRST_ANY_OF_SEED + 1]
