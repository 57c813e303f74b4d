"""A log may be read by many: what an error has to do with is told, the values of variables are not."""

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
def test_no_value_of_a_variable_is_told(form: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, form], capture_output=True, text=True, check=True)
    assert "the error 8" in done.stdout
    assert "fails" in done.stdout
    assert "hushhush" not in done.stdout
