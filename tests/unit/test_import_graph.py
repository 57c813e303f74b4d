"""The import graph of the package has no cycles, imports for type checkers included."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

# Each is to be opened; nothing may be added.
KNOWN = [
    {
        "genie.server.connection",
        "genie.server.follower",
        "genie.server.listener",
        "genie.server.partial_lines",
        "genie.server.rejections",
        "genie.server.scheduler",
        "genie.server.sessions",
    },
]


def imports() -> dict[str, set[str]]:
    graph = grimp.build_graph("genie", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def without(graph: dict[str, set[str]], cycles: list[set[str]]) -> dict[str, set[str]]:
    """Return the graph without the imports within each of the cycles."""
    left = {}
    for module, imported in graph.items():
        own = set().union(*(cycle for cycle in cycles if module in cycle))
        left[module] = imported - own
    return left


def check(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these modules import each other: {' <- '.join(error.args[1])}") from None


def test_no_modules_import_each_other() -> None:
    check(without(imports(), KNOWN))


@pytest.mark.parametrize("known", KNOWN, ids=min)
def test_a_known_cycle_that_was_opened_leaves_the_list(known: set[str]) -> None:
    others = [cycle for cycle in KNOWN if cycle is not known]
    with pytest.raises(AssertionError, match="import each other"):
        check(without(imports(), others))
