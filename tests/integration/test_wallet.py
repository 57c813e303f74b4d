"""The example: replicas pay out of shared wallets, one is killed, and no money is lost or made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from ports import free_port
from servers import WAIT_S, Genie

WALLET = Path(__file__).parents[2] / "examples" / "wallet.py"


def wallet(port: int, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(WALLET), *args],
        env=os.environ | {"GENIE_HOST": "127.0.0.1", "GENIE_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        check=False,
    )


def test_the_totals_are_kept_while_a_replica_is_killed(genie: Genie) -> None:
    result = wallet(genie.port, "--replicas", "2", "--seconds", "2", "--lease", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "replica 0 was killed" in result.stdout
    assert "in all before 600.00, after 600.00, difference 0.00" in result.stdout
    (payments,) = re.findall(r"payments ([\d,]+)", result.stdout.splitlines()[-2])
    assert int(payments.replace(",", "")) > 0


def test_without_a_server_it_says_so() -> None:
    result = wallet(free_port())
    assert result.returncode == 1
    assert "genie serve" in result.stderr


def test_options_that_make_no_sense_are_refused(genie: Genie) -> None:
    for options in (["--seconds", "nan"], ["--lease", "0"], ["--at-a-time", "0"], ["--wallets", "1"]):
        result = wallet(genie.port, *options)
        assert result.returncode == 2, options
        assert "usage:" in result.stderr
