"""A failure is printed when it happens, not at the end of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.runs import failures

FILE = """
import pathlib, time

def test_fails():
    print("what it", "printed")
    assert 1 == 2, "the reason"

def test_waits_until_the_failure_was_read():
    seen = pathlib.Path(__file__).with_name("seen")
    for _ in range(3000):
        if seen.exists():
            return
        time.sleep(0.01)
    raise AssertionError("nobody saw it")
"""

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(failures.__file__).parents[2]),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the other plugins take long to import
}


def test_a_failure_in_a_worker_is_printed_before_the_next_test_ends(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FILE)
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "support.runs.failures",
            "-p",
            "xdist",
            "--rootdir",
            str(tmp_path),
            "-n",
            "1",
            "test_it.py",
        ],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "what it printed" in line:
                break
        (tmp_path / "seen").touch()
        rest = process.stdout.read()
    assert any("FAILURE test_it.py::test_fails" in line for line in lines)
    assert any("AssertionError: the reason" in line for line in lines)
    assert "1 failed, 1 passed" in rest
    assert "FAILED test_it.py::test_fails" in rest, "the summary names it again"
    assert "what it printed" not in rest


def test_a_collection_error_is_printed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import no_such_module")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "support.runs.failures",
            "--rootdir",
            str(tmp_path),
            "test_it.py",
        ],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout.count("No module named 'no_such_module'") == 1
