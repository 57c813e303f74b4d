"""The import graphs of the packages: no cycles, imports for type checkers included, and the contracts of the applications."""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

APPLICATIONS = sorted(path.parent for path in (Path(__file__).parents[2] / "applications").glob("*/pyproject.toml"))


@pytest.mark.parametrize("package", ["genie", "simulator", *(f"genie_{folder.name}" for folder in APPLICATIONS)])
def test_the_import_graph_has_no_cycles(package: str) -> None:
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(f"these modules import each other: {' <- '.join(error.args[1])}") from None


@pytest.mark.parametrize("folder", APPLICATIONS, ids=lambda folder: folder.name)
def test_the_import_contracts_of_an_application_are_kept(folder: Path) -> None:
    """`genie_tokens` and others use only public modules of `genie`."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "pyproject.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
