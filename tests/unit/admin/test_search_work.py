"""The work of comparing requests with a text: it is bounded, and other clients are served in between."""

from __future__ import annotations

import asyncio

import pytest

from genie.admin import views
from genie.admin.throttle import MAX_SLICE_WORK, WorkBudget
from genie.core import LockManager
from genie.protocol.commands import LargeRequest, read

NAMES = views.MAX_COMPARED_RESOURCES
LONG = "İ" * 500
"""Python takes 100 ns to fold the case of one of these characters, which then are two."""
LONGEST_REQUEST = (NAMES + 1) * (2 + 512 // views.CHARS_PER_WORK_UNIT)


def manager_with_long_names(requests: int) -> LockManager:
    manager = LockManager()
    for number in range(requests):
        resources = ",".join(f'"exclusive:{LONG}{number}/{name}"' for name in range(NAMES))
        line = f'{{"command":"request","payload":{{"resources":[{resources}],"note":"n","transactionName":"t"}}}}'
        command = read(line.encode())
        manager.step(command.request if isinstance(command, LargeRequest) else command, 0.0)  # type: ignore[arg-type]
    return manager


async def test_comparing_long_names_yields_often() -> None:
    manager, budget, iterations = manager_with_long_names(20), WorkBudget(), 0

    def count_iteration() -> None:
        nonlocal iterations
        iterations += 1
        loop.call_soon(count_iteration)

    loop = asyncio.get_running_loop()
    loop.call_soon(count_iteration)
    response = await views.requests(manager.table, "zz", 100, 0.0, budget)
    assert (response.held, response.complete) == ([], True)
    assert iterations >= 20, "at least one for each request"
    assert budget.max_spent <= MAX_SLICE_WORK + LONGEST_REQUEST


async def test_a_search_ends_when_it_has_compared_much(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_with_long_names(20)
    monkeypatch.setattr(views, "MAX_COMPARING_WORK", 10 * LONGEST_REQUEST)
    last = await views.requests(manager.table, "19/1", 100, 0.0, WorkBudget())
    assert (last.held, last.complete) == ([], False)
    first = await views.requests(manager.table, "0/1", 1, 0.0, WorkBudget())
    assert len(first.held) == 1
    exact = await views.requests(manager.table, f"{LONG}19/1", 100, 0.0, WorkBudget())
    assert (len(exact.held), exact.complete) == (1, False)
