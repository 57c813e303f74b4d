"""A class with more than 16 fields states the reason, beside its fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("genie", "applications", "simulator", "conformance")
MAX_FIELDS = 16
REASON = f"More than {MAX_FIELDS} fields"


def assigned_names(node: ast.stmt) -> Iterator[str]:
    """Yield the field that an annotation of a class declares, or the fields that a method assigns."""
    if isinstance(node, ast.AnnAssign):
        if isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation):
            yield node.target.id
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for each in ast.walk(node):
            if (
                isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and ast.unparse(each.value) == "self"
            ):
                yield each.attr


def test_a_class_with_many_fields_states_the_reason() -> None:
    large = 0
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef):
                continue
            fields = {name for statement in node.body for name in assigned_names(statement)}
            if len(fields) > MAX_FIELDS:
                large += 1
                where = f"{path.relative_to(ROOT)}: {node.name} has {len(fields)} fields"
                assert REASON in (ast.get_source_segment(text, node) or ""), f'{where}: begin a comment with "{REASON}"'
    assert large
