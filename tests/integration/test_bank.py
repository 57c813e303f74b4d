"""The example: money is kept under locks and lost without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie

BANK = Path(__file__).parents[2] / "examples" / "bank.py"


def bank(port: int, *args: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"GENIE_HOST": "127.0.0.1", "GENIE_PORT": str(port)}
    return subprocess.run(
        [sys.executable, str(BANK), *args],
        env=variables,
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        check=False,
    )


def counted(output: str) -> dict[str, int]:
    """The numbers of the last line of progress."""
    found = re.findall(r"(transfers|retries|deadlocks|lost locks) ([\d,]+)", output)
    return {name: int(number.replace(",", "")) for name, number in found}


def test_locks_keep_the_sum_through_deadlocks_and_lost_locks(genie: Genie) -> None:
    args = "--workers 4 --accounts 3 --transfers 25 --pause 0.01"
    result = bank(genie.port, *args.split())
    assert (result.returncode, result.stderr) == (0, "")
    assert "sum before 30,000.00, after 30,000.00, difference 0.00" in result.stdout
    done = counted(result.stdout)
    assert done["transfers"] == 4 * 25
    assert done["lost locks"] > 0
    assert done["retries"] > 0


def test_without_locks_money_is_lost() -> None:
    """Four clerks on two accounts, each of whose transfers overlaps with others': that no update is lost, or that all
    that are lost add up to nothing, happens once in far more runs than there will be."""
    args = "--without-locks --workers 4 --accounts 2 --transfers 30 --pause 0.01"
    result = bank(free_port(), *args.split())
    assert (result.returncode, result.stderr) == (0, "")
    assert "sum before 20,000.00, after " in result.stdout
    assert "difference 0.00" not in result.stdout
    assert counted(result.stdout)["transfers"] == 4 * 30


def test_without_a_server_it_says_so() -> None:
    port = free_port()
    result = bank(port, "--transfers", "1")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"bank: no server at 127.0.0.1:{port}: ")
    assert result.stderr.count("\n") == 1
