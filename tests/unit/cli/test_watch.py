from __future__ import annotations

import importlib

import pytest

import genie.cli.watch  # noqa: F401 - the module, whose name the package gives to the command
from genie import Change

WATCH = importlib.import_module("genie.cli.watch")


def test_a_change_as_text_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    WATCH._print_text(Change("t/1", "locked", "shared", 7))
    WATCH._print_text(Change("t/1", "unlocked", "exclusive", 7, "t\u202e7"))
    assert capsys.readouterr().out == "locked    shared:t/1  7\nunlocked  exclusive:t/1  7 of t\\u202e7\n"


def test_a_change_as_json_has_the_names_of_the_wire_format(capsys: pytest.CaptureFixture[str]) -> None:
    WATCH._print_json(Change("t/1", "locked", "shared", 7, 't"7'))
    assert capsys.readouterr().out == (
        '{"state":"locked","resource":"t/1","mode":"shared","id":7,"transactionName":"t\\"7"}\n'
    )
    WATCH._print_json(Change("t/1", "unlocked", "shared", 7))
    assert "transactionName" not in capsys.readouterr().out
