"""examples/dashboard.py says what it does, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from genie import sync
from ports import free_port
from servers import WAIT_S, Genie

DASHBOARD = Path(__file__).parents[2] / "examples" / "dashboard.py"


def start(port: int, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DASHBOARD), "--port", str(port), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_where_to_look_and_gives_its_locks_back(genie: Genie, number: signal.Signals) -> None:
    process = start(genie.port, "--admin-port", "8123")
    assert process.stdout is not None
    try:
        assert "240 orders hold their locks" in process.stdout.readline()
        assert "Look at http://127.0.0.1:8123/" in process.stdout.readline()
        with sync.connect(*genie.address) as client:
            while not client.inspect(resource="stock/lamp-brass").queue_total:
                assert process.poll() is None
            assert client.inspect().holders_total >= 240
            process.send_signal(number)
            output, errors = process.communicate(timeout=WAIT_S)
            assert (process.returncode, errors) == (0, "")
            assert output == "All its locks are released.\n"
            for name in ("orders/4100", "stock/lamp-brass", "catalogue", "ledger/2026-11"):
                assert client.inspect(resource=name).holders_total == 0
            while client.inspect().holders_total:
                pass  # a worker's last lock ends by its timeout, if it was granted while the worker was stopped
    finally:
        process.kill()
        process.wait()


def test_without_a_server_it_says_so() -> None:
    process = start(free_port())
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "dashboard: no server at 127.0.0.1:" in errors
    assert "genie serve" in errors
    assert errors.count("\n") == 1
