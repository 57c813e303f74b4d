"""How many names the server reads in order to list the held locks of a `watch`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from genie.config import Limits
from genie.core import LockManager, Request
from genie.core.wait_queue import LockedResource
from genie.server import watches
from genie.server.sessions import SessionTable
from genie.server.state_size import StateSize
from genie.server.watches import WatchRegistry


class CountingDict(dict[str, Any]):
    """A dict that counts the keys that iterations have returned."""

    count = 0

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.count += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)


def registry(names: int, resources: int = 0) -> tuple[WatchRegistry, Any]:
    request, manager = Request(exclusive=("a",)), LockManager()
    request.id = 7
    resource = LockedResource(request, 1)
    table: Any = SimpleNamespace(
        subtrees={},
        uncontended=CountingDict.fromkeys(map(str, range(names)), request),
        resources=CountingDict.fromkeys((f"r{number}" for number in range(resources)), resource),
    )
    return WatchRegistry(table, StateSize(manager, SessionTable(), Limits()), 1 << 20), table


@pytest.mark.parametrize("counts", [(1_000_000, 0), (0, 1_000_000), (150_000, 150_000)])
def test_a_limited_number_of_names_is_read(counts: tuple[int, int]) -> None:
    watched, table = registry(*counts)
    assert watched.encode_held_locks("nothing") == ([], True)
    assert table.uncontended.count + table.resources.count <= 200_001


def test_the_list_is_complete_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "MAX_WATCH_SEARCHED_NAMES", 20)
    for names, resources, truncated in ((10, 10, False), (11, 10, True), (10, 11, True)):
        watched, _ = registry(names, resources)
        rows, is_truncated = watched.encode_held_locks("r9")
        assert (len(rows), is_truncated) == (int(names != 11), truncated)
