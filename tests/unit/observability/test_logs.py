"""Logs contain no secrets (tracebacks have no values of variables), and nothing that controls a terminal."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
logs.configure("info", "console")
structlog.get_logger().warning("rejected", path="/\\u009b2J\\u202e\\u2028x", names=["\\u009b"], nested={"\\u202e": "\\x1b[2J"})
"""


def test_the_console_shows_control_characters_as_escapes() -> None:
    result = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=True)
    (line,) = result.stdout.splitlines()
    assert line.isprintable()
    assert r"path=/\x9b2J\u202e\u2028x" in line
