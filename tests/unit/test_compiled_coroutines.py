"""Coroutines of the compiled modules do not wait while they handle an exception.

If such a coroutine is closed there, and another compiled coroutine awaits it, mypyc raises the handled exception in place of
`GeneratorExit`, or writes a traceback into `None`, which is too small: it overwrites the type of `None` behind it.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def waits_in_handlers(source: str) -> Iterator[int]:
    """Return the lines of `await`, `async with` and `async for` within `except` and `finally`."""
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Try):
            for handler in (*statement.handlers, *statement.finalbody):
                for node in ast.walk(handler):
                    if isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor):
                        yield node.lineno


def test_no_compiled_coroutine_waits_in_a_handler() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]["include"]
    files = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert len(files) > 40
    assert [f"{path.name}:{line}" for path in files for line in waits_in_handlers(path.read_text())] == []
