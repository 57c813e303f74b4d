"""docs/ledger-timeouts.md : its commands print the shown lines, its tables agree with the code."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import chain
from pathlib import Path

import click
from pages import blocks, code, errors_of, table
from running import run_shell

import genie_ledger as timeouts
from genie_ledger.cli import main
from genie_ledger.cli.ledger_file import read_ledger
from genie_ledger.explain import Progress
from support.processes.servers import Genie

PAGE = "applications/ledger/docs/ledger-timeouts.md"
BLOCKS = blocks(PAGE)


def test_the_commands_do_what_is_shown(genie: Genie, tmp_path: Path) -> None:
    block = next(block for block in BLOCKS if block.language == "sh")
    run_shell(block, BLOCKS, genie, tmp_path)


def test_the_file_describes_the_ledger_of_the_python_example(tmp_path: Path) -> None:
    (document,) = (block for block in BLOCKS if block.language == "toml")
    (python,) = (block for block in BLOCKS if "Ledger(\n" in block.text)
    (tmp_path / "genie.toml").write_text(document.text)
    (call,) = (node for node in ast.walk(ast.parse(python.text)) if isinstance(node, ast.Call) and node.keywords)
    expected = timeouts.Ledger(**{argument.arg: ast.literal_eval(argument.value) for argument in call.keywords})
    found = read_ledger(str(tmp_path / "genie.toml"))
    assert (found.processing_states, found.final_states) == (expected.processing_states, expected.final_states)
    for one, other in zip(found.tables.all, expected.tables.all, strict=True):
        assert one.name == other.name
        assert [column.name for column in one.columns] == [column.name for column in other.columns]


def test_the_default_states_are_the_code_s() -> None:
    processing, *final = (row["Default"].split(", ") for row in table(PAGE, "List"))
    assert tuple(processing) == timeouts.PROCESSING_STATES
    assert tuple(chain(*final)) == timeouts.FINAL_STATES


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


def test_the_readme_has_every_command() -> None:
    rows = table("applications/ledger/README.md", "Command")
    named = {name for row in rows for name in re.findall(r"`(?:genie-ledger )?(\w+)`", row["Command"])}
    assert named == {*main.list_commands(click.Context(main))}


def test_how_far_the_handler_is_is_explained() -> None:
    shown = [code(row["`handler` with `--json`"]) for row in table(PAGE, "`handler` with `--json`")]
    assert shown == [progress.value for progress in Progress]
