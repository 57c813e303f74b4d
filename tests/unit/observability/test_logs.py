"""Logs contain no secrets (tracebacks have no values of variables), and nothing that controls a terminal."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import genie
from genie.text import is_printable

SCRIPT = """
import sys
from genie.observability import logs
import structlog
logs.configure("info", sys.argv[1])
def fails():
    password = "".join(["hush", "hush"])
    raise RuntimeError("the error " + str(len(password)))
try:
    fails()
except RuntimeError as error:
    structlog.get_logger().error("a defect", exc_info=error)
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_tracebacks_contain_no_values_of_variables(form: str) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT, form], capture_output=True, text=True, check=True)
    assert "the error 8" in result.stdout
    assert "fails" in result.stdout
    assert "hushhush" not in result.stdout


HOSTILE = """
from genie.observability import logs
import structlog
import sys
logs.configure("info", sys.argv[1])
structlog.get_logger().warning("rejected", path="/\\u009b2J\\u202e\\u2028x", names=["\\u009b", "\\u3164"], nested={"\\u202e": "\\x1b[2J"})
try:
    raise RuntimeError("failed at \\u009b2J\\u202e\\x1b[2J")
except RuntimeError as error:
    structlog.get_logger().error("defect", exc_info=error)
"""


@pytest.mark.parametrize(
    ("form", "path"), [("console", r"path=/\x9b2J\u202e\u2028x"), ("json", r'"path":"/\u009b2J\u202e\u2028x"')]
)
def test_the_log_shows_control_characters_as_escapes(form: str, path: str) -> None:
    result = subprocess.run([sys.executable, "-c", HOSTILE, form], capture_output=True, text=True, check=True)
    lines = result.stdout.split("\n")
    assert all(map(is_printable, lines))
    assert path in lines[0]
    if form == "json":
        assert json.loads(lines[0])["path"] == "/\x9b2J\u202e\u2028x"


def test_the_field_for_the_text_of_an_error_has_one_name() -> None:
    fields = {
        (path.name, keyword.arg)
        for path in Path(genie.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in {"debug", "info", "warning", "error"}
        for keyword in call.keywords
    }
    assert "reason" in {field for _, field in fields}
    assert [each for each in sorted(fields, key=str) if each[1] == "error"] == []
