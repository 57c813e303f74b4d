from __future__ import annotations

import importlib

import genie.cli.watch  # noqa: F401 - the module, whose name the package gives to the command
from genie import Change

WATCH = importlib.import_module("genie.cli.watch")


def test_a_change_as_text_is_escaped() -> None:
    assert WATCH._format_text(Change("t/1", "locked", "shared", 7)) == "locked    shared:t/1  7"
    assert WATCH._format_text(Change("t/1", "unlocked", "exclusive", 7, "t\u202e7")) == (
        "unlocked  exclusive:t/1  7 of t\\u202e7"
    )


def test_a_change_as_json_has_the_names_of_the_wire_format() -> None:
    assert WATCH._format_json(Change("t/1", "locked", "shared", 7, 't"7')) == (
        '{"state":"locked","resource":"t/1","mode":"shared","id":7,"transactionName":"t\\"7"}'
    )
    assert "transactionName" not in WATCH._format_json(Change("t/1", "unlocked", "shared", 7))
