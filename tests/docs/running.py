"""Executes the shell commands of a page, and compares their output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matching import Screen
from pages import Block

from support.processes.servers import WAIT_S, Genie


def run_shell(block: Block, blocks: Sequence[Block], genie: Genie, folder: Path) -> None:
    """Execute a block of commands; compare its output with the text block after it."""
    _compare(block, ["sh", "-euc", f"exec 2>&1\n{block.text}"], blocks, genie, folder)


def _compare(block: Block, command: list[str], blocks: Sequence[Block], genie: Genie, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env=os.environ | {"GENIE_HOST": "127.0.0.1", "GENIE_PORT": str(genie.port), "PATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{block}: {done.stdout}{done.stderr}"
    shown = dict(pairwise(blocks))[block]
    assert shown.language == "text"
    Screen().match_all(shown.lines, done.stdout.splitlines())
