"""Logged tracebacks must not contain secrets: they have no values of variables."""

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
