"""Forked `genie` commands behave like separate processes."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from support.processes.ports import free_port
from support.processes.programs import run_genie, start_genie
from support.processes.servers import WAIT_S

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_output_and_exit_status() -> None:
    done = run_genie("--version", env=os.environ, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("genie, version ")
    done = run_genie("no-such-command", env=os.environ, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-command" in done.stderr


def test_the_environment_is_exactly_the_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENIE_ADMIN_PORT", "not a port")
    assert "not a port" in run_genie("top", env=os.environ, timeout=WAIT_S).stderr
    port = str(free_port())
    assert "not a port" not in run_genie("top", env={"GENIE_ADMIN_PORT": port}, timeout=WAIT_S).stderr


@pytest.mark.server
def test_signals_timeouts_and_stdin() -> None:
    order = ["serve", "--port", "0", "--admin-port", ""]
    with start_genie(*order, env={}, text=True, stdin=subprocess.PIPE, **PIPES) as process:
        assert process.stdout is not None
        assert "listening" in process.stdout.readline()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate("ignored", timeout=WAIT_S)
    assert "stopped" in stdout
    assert (process.returncode, stderr) == (0, "")
    process.kill()  # there is nothing left to kill
    with start_genie(*order, env={}, start_new_session=True, **PIPES) as process:
        assert os.getsid(process.pid) == process.pid
        process.kill()
        assert process.wait(WAIT_S) == -signal.SIGKILL
