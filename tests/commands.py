"""The `genie` command as a process of its own, run to its end."""

from __future__ import annotations

import os
import subprocess

from programs import run_genie
from servers import WAIT_S


def genie_cli(*args: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """`genie ARGS`. `variables` as they are named: `admin_port=8080` is GENIE_ADMIN_PORT; there are no others of Genie."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    variables = {f"GENIE_{name.upper()}": str(value) for name, value in variables.items()}
    return run_genie(*args, env=clean | {"PYTHONIOENCODING": "utf-8"} | variables, timeout=WAIT_S)
