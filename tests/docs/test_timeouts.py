"""docs/timeouts.md is true: its Python runs and prints what is shown, its tables are those of the code."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from pages import Block, blocks, code, errors_of, table
from running import run_python, run_shell

from genie import timeouts
from genie.timeouts.explain import Progress
from servers import Genie

PAGE = "docs/timeouts.md"
BLOCKS = blocks(PAGE)
PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs_and_prints_what_is_shown(block: Block, genie: Genie, tmp_path: Path) -> None:
    run_python(block, BLOCKS, genie, tmp_path)


def test_the_commands_do_what_is_shown(genie: Genie, tmp_path: Path) -> None:
    block = next(block for block in BLOCKS if block.language == "sh")
    run_shell(block, BLOCKS, genie, tmp_path)


def test_every_error_is_there() -> None:
    assert {code(row["Error"]) for row in table(PAGE, "Error")} == errors_of(timeouts)


def test_the_arguments_are_the_code_s() -> None:
    parameters = dict(inspect.signature(timeouts.TimeoutHandler).parameters)
    del parameters["url"]
    shown = {code(row["Argument"]): row["Default"] for row in table(PAGE, "Argument")}
    assert set(shown) == set(parameters)
    for name, default in shown.items():
        assert (None if default == "none" else code(default)) == (
            None if parameters[name].default is inspect.Parameter.empty else repr(parameters[name].default)
        )


def test_how_far_the_handler_is_is_explained() -> None:
    shown = [code(row["`handler` with `--json`"]) for row in table(PAGE, "`handler` with `--json`")]
    assert shown == [progress.value for progress in Progress]
