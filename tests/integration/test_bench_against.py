"""The comparison with another commit builds it, measures both sides, and prints a row for each shape."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.against_parts.load import SHAPES

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark needs Linux"),
    pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs the repository"),
]


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/against.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_each_shape_is_compared_with_the_commit() -> None:
    result = compare("HEAD", "--rounds", "1", "--seconds", "0.1", "--warm-up", "0.05", "--store", "redis")
    assert result.returncode == 0, result.stdout + result.stderr
    base, now, machine, _, _, *table = result.stdout.splitlines()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    assert base.startswith(f"base: {commit} ")
    assert now.startswith(f"now:  {commit} ")
    assert base.endswith("(pure Python)")
    assert "CPython" in machine
    assert [re.split(r"\s{2,}", row)[0] for row in table[-len(SHAPES) :]] == [f"redis, {s.title}" for s in SHAPES]
    assert all(float(re.findall(r" (\d+\.\d\d)  \(", row)[0]) > 0 for row in table[-len(SHAPES) :])


def test_an_unknown_commit_is_named() -> None:
    result = compare("no-such-commit")
    assert result.returncode == 1
    assert result.stderr == "'no-such-commit' is no commit of this repository\n"
