"""The patterns of the conformance cases, and that the kit needs the standard library only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import Case, load, select
from conformance.matching import ABSENT, matches, substitute

KIT = Path(__file__).parent.parent.parent.parent / "conformance"


@pytest.mark.parametrize(
    ("pattern", "value", "expected"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"b": 2}, False),
        ({"$only": {"a": 1}}, {"a": 1, "b": 2}, False),
        ({"a": {"$absent": True}}, {"b": 2}, True),
        ({"a": {"$absent": True}}, {"a": None}, False),
        ([1, 2], [1, 2], True),
        ([1], [1, 2], False),
        ({"$unordered": [{"a": 1}, {"a": "$x"}]}, [{"a": 2}, {"a": 1}], True),
        ({"$unordered": [1, 2]}, [1, 1], False),
        ({"$contains": ["a"]}, ["b", "a"], True),
        ({"$contains": "lo"}, "lock", True),
        ({"$not": {"$contains": ["a"]}}, ["a"], False),
        ({"$oneOf": [{"a": 1}, None]}, None, True),
        ({"$oneOf": [1, 2]}, 3, False),
        ({"$above": 2}, 2, False),
        ({"$atLeast": 2, "$below": 3}, 2.5, True),
        ({"$atLeast": "$bound"}, 6, False),
        ({"$atLeast": 0}, True, False),
        ({"$type": "integer"}, 1.0, False),
        ({"$type": "integer"}, True, False),
        ({"$length": [1, 2]}, "abc", False),
        ({"$prefix": "gen"}, "genie/1", True),
        ({"$bind": "$id", "state": "held"}, {"state": "held"}, True),
        ({"$bind": "$id", "state": "held"}, {"state": "queued"}, False),
        (1, True, False),
        ("$bound", 7, True),
        ("$bound", 8, False),
        ("$new", ABSENT, False),
        ("x{run}", "xR", True),
    ],
)
def test_a_pattern_matches(pattern: Any, value: Any, expected: bool) -> None:
    assert matches(pattern, value, {"$bound": 7, "run": "R"}) is expected


def test_variables_are_bound_only_by_a_match() -> None:
    variables: dict[str, Any] = {}
    assert not matches({"id": "$id", "state": "held"}, {"id": 1, "state": "queued"}, variables)
    assert variables == {}
    assert matches({"id": "$id", "copy": "$id"}, {"id": 1, "copy": 1}, variables)
    assert variables == {"$id": 1}


def test_values_to_send_are_generated() -> None:
    variables = {"$id": 5, "run": "R-"}
    assert substitute({"id": "$id", "name": "{run}a"}, variables) == {"id": 5, "name": "R-a"}
    assert substitute({"$repeat": ["{run}", "x", 3]}, variables) == "R-xxx"
    assert substitute({"$list": [{"name": "n{i}", "id": "{i}"}, 2]}, variables) == [
        {"name": "n0", "id": 0},
        {"name": "n1", "id": 1},
    ]
    assert substitute({"$add": ["$id", 1]}, variables) == 6


def test_cases_are_selected_by_rule_section_or_name() -> None:
    def names(*filters: str) -> list[str]:
        cases = [
            Case("of-1-rule", "rule 1", "", []),
            Case("two", "rule 10", "", []),
            Case("three", "section Any of these", "", []),
        ]
        return [case.name for case in select(cases, filters)]

    assert names() == ["of-1-rule", "two", "three"]
    assert names("1") == ["of-1-rule"]
    assert names("any of these", "tw") == ["two", "three"]


@pytest.mark.parametrize("direction", ["client", "server"])
def test_the_first_key_of_every_step_names_it(direction: str) -> None:
    source = (KIT / f"{direction}_runner.py").read_text(encoding="utf-8")

    def check(steps: Any) -> None:
        for step in steps:
            assert f"def _do_{next(iter(step))}(" in source, step
            check(step.get("steps", []))

    for case in load(direction):
        check(case.steps)


@pytest.mark.parametrize("path", sorted(KIT.glob("*.py")), ids=lambda path: path.name)
def test_the_kit_imports_the_standard_library_only(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported <= set(sys.stdlib_module_names) | {"conformance"}
