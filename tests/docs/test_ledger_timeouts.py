"""docs/how-to/ledger-timeouts.md : its commands print the shown lines, its tables agree with the code."""

from __future__ import annotations

import inspect
from pathlib import Path

from pages import blocks, code, errors_of, table
from running import run_shell

from genie import timeouts
from genie.timeouts.explain import Progress
from servers import Genie

PAGE = "docs/how-to/ledger-timeouts.md"
BLOCKS = blocks(PAGE)


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
