"""What the API shows of units and subtrees."""

from __future__ import annotations

import json

import pytest
from msgspec import to_builtins

from genie.admin import views
from genie.admin.throttle import MAX_SLICE_WORK, WorkBudget
from genie.core import LockManager, Request
from genie.protocol.commands import read, without_namespace


@pytest.fixture
def manager() -> LockManager:
    manager = LockManager(next_id=1)
    for resources in (["7/10:pool", "shared:a/1"], ["2/10:pool"], ["4/12:pool", "exclusive:b"], ["exclusive:a/**"]):
        step(manager, *resources)
    return manager


def step(manager: LockManager, *resources: str) -> None:
    """Execute a request for these resources."""
    line = json.dumps({"command": "request", "payload": {"resources": resources}}).encode()
    request = without_namespace(read(line))
    assert isinstance(request, Request)
    manager.step(request, 0.0)


async def test_a_counted_resource_has_its_units(manager: LockManager) -> None:
    pool = to_builtins(await views.resource(manager.table, "pool", 0.0, WorkBudget()))
    assert (pool["unitsInUse"], pool["unitsLimit"]) == (9, 12)
    assert [row["resources"] for row in pool["holders"]] == [["shared:a/1", "7/10:pool"], ["2/10:pool"]]
    (waiter,) = pool["queue"]
    assert (waiter["resources"], waiter["resourcesTotal"]) == (["exclusive:b", "4/12:pool"], 2)
    blockers = [(each["resource"], each["mode"], each["units"], each["of"]) for each in waiter["blockers"]]
    assert blockers == [("pool", "units", 7, 10), ("pool", "units", 2, 10)]
    assert "heldBelow" not in pool


async def test_a_subtree_has_the_number_of_locks_below_it(manager: LockManager) -> None:
    subtree = to_builtins(await views.resource(manager.table, "a/**", 0.0, WorkBudget()))
    assert (subtree["heldBelow"], subtree["holdersTotal"], subtree["queueTotal"]) == (1, 1, 1)
    assert subtree["holders"][0]["resources"] == ["shared:a/1", "7/10:pool"]
    (blocker,) = subtree["queue"][0]["blockers"]
    assert (blocker["resource"], blocker["mode"]) == ("a/1", "shared")
    assert "units" not in blocker


async def rows_of(manager: LockManager, name: str) -> tuple[list[int], list[int]]:
    """Return the ids of the holders and of the queue of a resource, after a check of the totals."""
    shown = await views.resource(manager.table, name, 0.0, WorkBudget())
    holders, queue = [row.id for row in shown.holders], [row.id for row in shown.queue]
    if shown.complete:
        assert (shown.holders_total, shown.queue_total) == (len(holders), len(queue))
    return holders, queue


async def test_a_name_has_the_requests_for_subtrees_above_it_and_a_subtree_those_below_it() -> None:
    manager = LockManager(next_id=1)
    for lock in ("shared:a/b/1", "shared:a/**", "exclusive:a/b/1", "exclusive:a/2", "exclusive:c/1", "shared:c/1"):
        step(manager, lock)
    step(manager, "shared:a/**", "exclusive:a/b/3")
    assert await rows_of(manager, "a/b/1") == ([2, 1], [3, 7])
    assert await rows_of(manager, "a/3") == ([2], [7])
    assert await rows_of(manager, "a/**") == ([2, 1], [3, 4, 7])
    assert await rows_of(manager, "a/b/**") == ([2, 1], [7, 3])
    assert await rows_of(manager, "c/**") == ([5], [6])
    assert await rows_of(manager, "**") == ([1, 2, 5], [3, 4, 6, 7])


async def test_a_bounded_number_of_requests_is_compared_with_a_subtree(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = LockManager(next_id=1)
    for number in range(300):
        step(manager, f"shared:a/{number}")
        step(manager, *[f"shared:b/{each}" for each in range(40)])
    budget = WorkBudget()
    shown = await views.resource(manager.table, "a/**", 0.0, budget)
    assert (shown.holders_total, len(shown.holders), shown.complete) == (300, 100, True)
    assert budget.max_spent < 2 * MAX_SLICE_WORK
    monkeypatch.setattr(views, "MAX_COMPARED", 20)
    shown = await views.resource(manager.table, "a/**", 0.0, WorkBudget())
    assert (shown.holders_total, shown.complete) == (10, False)
    monkeypatch.setattr(views, "MAX_COMPARED", 600)
    monkeypatch.setattr(views, "MAX_COMPARING_WORK", 6)
    shown = await views.resource(manager.table, "a/**", 0.0, WorkBudget())
    assert (shown.holders_total, shown.complete) == (1, False), "1 + 40 / 8 units for the other request"


async def test_the_edges_of_the_graph_have_units(manager: LockManager) -> None:
    graph = to_builtins(await views.graph(manager.table, 100, WorkBudget()))
    edges = [(each["waiter"], each["blocker"], each["resource"], each.get("units")) for each in graph["edges"]]
    assert edges == [(3, 1, "pool", 7), (3, 2, "pool", 2), (4, 1, "a/1", None)]


async def test_units_and_subtrees_are_found_by_name(manager: LockManager) -> None:
    for text, ids in (("pool", [1, 2, 3]), ("a/**", [4])):
        found = await views.requests(manager.table, text, 10, 0.0, WorkBudget())
        assert [row.id for row in (*found.held, *found.waiting)] == ids


async def test_a_queue_names_the_holder_that_blocks_it() -> None:
    manager = LockManager(next_id=1)
    for lock in (
        "shared:a/1",
        "exclusive:a/**",
        "shared:a/1",
        "exclusive:b/**",
        "shared:b/1",
        "1/2:b/2",
        "exclusive:c/**",
    ):
        step(manager, lock)
    queues, _ = await views.longest_queues(manager.table, WorkBudget())
    assert {queue.resource: (queue.waiting, queue.holders, queue.holder) for queue in queues} == {
        "a/**": (2, 1, 1),
        "a/1": (1, 1, 1),
        "b/1": (1, 1, 4),
        "b/2": (1, 1, 4),
    }
