"""The work of a cycle, by store and shape, compared with a baseline that a commit must change knowingly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.processes.servers import Redis, running_redis
from work import baseline


@pytest.fixture(scope="module")
def own_redis() -> Iterator[Redis]:
    """A new Redis, so that the numbers in it have the same length in each run."""
    with running_redis() as redis:
        yield redis


@pytest.mark.parametrize("shape", baseline.SHAPES)
@pytest.mark.parametrize("store", baseline.STORES)
def test_the_work_of_a_cycle_is_that_of_the_baseline(store: str, shape: str, request: pytest.FixtureRequest) -> None:
    recorded = baseline.read()
    redis = request.getfixturevalue("own_redis") if store == "redis" else None
    found = baseline.differences(baseline.count_shape(shape, redis), recorded[store][shape], recorded["python"])
    assert not found, baseline.verdict(f"{store}, {shape}", found)


@pytest.mark.parametrize("subject", baseline.CLIENTS)
def test_the_work_of_the_client_is_that_of_the_baseline(subject: str) -> None:
    recorded = baseline.read()
    counts = baseline.count_client(baseline.CLIENTS[subject])
    found = baseline.differences(counts, recorded["client"][subject], recorded["python"])
    assert not found, baseline.verdict(f"the client, {subject}", found)


def test_the_instructions_of_the_lock_manager_are_those_of_the_baseline() -> None:
    recorded = baseline.read()
    found = baseline.differences(baseline.count_core(), recorded["core"], recorded["python"])
    assert not found, baseline.verdict("the lock manager", found)


def test_more_and_less_work_than_the_tolerance_are_differences() -> None:
    recorded = {"opcodes": 1000.0, "reads": 2.0}
    version = baseline.python_version()
    assert baseline.differences({"opcodes": 1009.0, "reads": 2.0}, recorded, version) == []
    assert baseline.differences({"opcodes": 1011.0, "reads": 2.0}, recorded, version) == [
        "opcodes: 1011, baseline 1000 (+1.1 %, tolerance 1%)"
    ]
    assert baseline.differences({"opcodes": 989.0, "reads": 1.99}, recorded, version) == [
        "opcodes: 989, baseline 1000 (-1.1 %, tolerance 1%)",
        "reads: 1.99, baseline 2 (-0.5 %, tolerance 0%)",
    ]
    assert baseline.differences({"opcodes": 9.0}, recorded, "other") == ["reads: None, baseline 2.0"]
