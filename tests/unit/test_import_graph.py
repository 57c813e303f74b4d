"""The import graph of the package has no cycles, imports for type checkers included."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp


def test_the_import_graph_has_no_cycles() -> None:
    graph = grimp.build_graph("genie", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(f"these modules import each other: {' <- '.join(error.args[1])}") from None
