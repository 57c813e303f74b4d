"""examples/dashboard.py says what it does, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from genie import sync
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie

DASHBOARD = Path(__file__).parents[2] / "examples" / "dashboard.py"


def start(*args: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DASHBOARD), *args],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_where_to_look_and_gives_its_locks_back(genie: Genie, number: signal.Signals) -> None:
    process = start("--port", str(genie.port), "--admin-port", "8123", GENIE_PORT="1", GENIE_ADMIN_PORT="1")
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
    process = start("--port", str(free_port()))
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "dashboard: no server at 127.0.0.1:" in errors
    assert "genie serve" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("admin_host", "page"),
    [("", "http://127.0.0.1:8124/"), ("::1", "http://[::1]:8124/"), ("https://page.test", "https://page.test:8124/")],
)
def test_the_environment_names_the_server_and_its_page(genie: Genie, admin_host: str, page: str) -> None:
    host, port = genie.address
    variables = {
        "GENIE_HOST": host,
        "GENIE_PORT": str(port),
        "GENIE_ADMIN_HOST": admin_host,
        "GENIE_ADMIN_PORT": "8124",
    }
    process = start(**variables)
    assert process.stdout is not None
    try:
        assert "240 orders hold their locks" in process.stdout.readline()
        assert f"Look at {page} (" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_server_of_the_environment_that_is_not_there_is_named() -> None:
    port = free_port()
    process = start(GENIE_HOST="localhost", GENIE_PORT=str(port))
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert f"dashboard: no server at localhost:{port}" in errors


async def test_a_picture_is_taken_before_the_locks_are_released() -> None:
    dashboard = runpy.run_path(str(DASHBOARD))
    holds, pictures = False, []

    async def simulate(*_: object) -> None:
        nonlocal holds
        holds = True
        try:
            await asyncio.Event().wait()
        finally:
            holds = False

    simulate_until = dashboard["simulate_until"]
    simulate_until.__globals__["simulate"] = simulate
    await simulate_until(1, 0.01, lambda: pictures.append(holds))
    assert pictures == [True]
    assert not holds
