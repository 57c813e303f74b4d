"""The example: replicas pay out of shared wallets, one is killed, and no money is lost or made."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie

WALLET = Path(__file__).parents[2] / "examples" / "wallet.py"


def wallet(port: int, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(WALLET), *args],
        env=os.environ | {"GENIE_HOST": "127.0.0.1", "GENIE_PORT": str(port)} | environment,
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        check=False,
    )


def test_totals_are_conserved_while_a_replica_is_killed(genie: Genie) -> None:
    result = wallet(genie.port, "--replicas", "2", "--seconds", "2", "--lease", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "replica 0 was killed" in result.stdout
    assert "in all before 600.00, after 600.00, difference 0.00" in result.stdout
    (payments,) = re.findall(r"payments ([\d,]+)", result.stdout.splitlines()[-2])
    assert int(payments.replace(",", "")) > 0


def test_an_unreachable_server_is_reported() -> None:
    result = wallet(free_port())
    assert result.returncode == 1
    assert "genie serve" in result.stderr


def test_invalid_options_are_rejected(genie: Genie) -> None:
    for options in (["--seconds", "nan"], ["--lease", "0"], ["--at-a-time", "0"], ["--wallets", "1"]):
        result = wallet(genie.port, *options)
        assert result.returncode == 2, options
        assert "usage:" in result.stderr


SEND_SIGINT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        in_replica = "--multiprocessing-fork" in sys.orig_argv
        if name == os.environ["SIGINT_AT"] and in_replica == (os.environ["SIGINT_IN"] == "replica"):
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("where", "module"), [("parent", "argparse"), ("parent", "genie_tokens"), ("replica", "genie_tokens")]
)
def test_ctrl_c_during_the_import_prints_no_traceback(genie: Genie, tmp_path: Path, where: str, module: str) -> None:
    """SIGINT arrives at the import of `module`. It ends the parent; a replica leaves it to the parent."""
    (tmp_path / "sitecustomize.py").write_text(SEND_SIGINT)
    environment = {"PYTHONPATH": str(tmp_path), "SIGINT_IN": where, "SIGINT_AT": module}
    result = wallet(genie.port, "--replicas", "1", "--seconds", "1", **environment)
    assert result.stderr == ""
    assert result.returncode == (-signal.SIGINT if where == "parent" else 0)


def test_ctrl_c_during_payments_prints_no_traceback(genie: Genie) -> None:
    process = subprocess.Popen(
        [sys.executable, str(WALLET), "--replicas", "2", "--seconds", "600"],
        env=os.environ | {"GENIE_HOST": "127.0.0.1", "GENIE_PORT": str(genie.port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert "in all" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (130, "")
