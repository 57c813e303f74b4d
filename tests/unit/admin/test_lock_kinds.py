"""What the API shows of units and subtrees."""

from __future__ import annotations

import json

import pytest
from msgspec import to_builtins

from genie.admin import views
from genie.admin.throttle import WorkBudget
from genie.core import LockManager, Request
from genie.protocol.commands import read, without_namespace


@pytest.fixture
def manager() -> LockManager:
    manager = LockManager(next_id=1)
    for resources in (["7/10:pool", "shared:a/1"], ["2/10:pool"], ["4/12:pool", "exclusive:b"], ["exclusive:a/**"]):
        line = json.dumps({"command": "request", "payload": {"resources": resources}}).encode()
        request = without_namespace(read(line))
        assert isinstance(request, Request)
        manager.step(request, 0.0)
    return manager


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
    assert (subtree["heldBelow"], subtree["holders"], subtree["queueTotal"]) == (1, [], 1)
    (blocker,) = subtree["queue"][0]["blockers"]
    assert (blocker["resource"], blocker["mode"]) == ("a/1", "shared")
    assert "units" not in blocker


async def test_the_edges_of_the_graph_have_units(manager: LockManager) -> None:
    graph = to_builtins(await views.graph(manager.table, 100, WorkBudget()))
    edges = [(each["waiter"], each["blocker"], each["resource"], each.get("units")) for each in graph["edges"]]
    assert edges == [(3, 1, "pool", 7), (3, 2, "pool", 2), (4, 1, "a/1", None)]


async def test_units_and_subtrees_are_found_by_name(manager: LockManager) -> None:
    for text, ids in (("pool", [1, 2, 3]), ("a/**", [4])):
        found = await views.requests(manager.table, text, 10, 0.0, WorkBudget())
        assert [row.id for row in (*found.held, *found.waiting)] == ids
