"""Runs the command `genie` as a process."""

from __future__ import annotations

import os
import subprocess

from support.processes.programs import run_genie
from support.processes.servers import WAIT_S


def genie_cli(*args: str, program: str = "genie", **variables: object) -> subprocess.CompletedProcess[str]:
    """Run `genie ARGS`, or another program.

    `variables` are the only ones of Genie in its environment: `admin_port=8080` sets GENIE_ADMIN_PORT.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    variables = {f"GENIE_{name.upper()}": str(value) for name, value in variables.items()}
    return run_genie(*args, env=clean | {"PYTHONIOENCODING": "utf-8"} | variables, timeout=WAIT_S, program=program)
