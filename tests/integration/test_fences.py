"""A process is stopped between its read and its write, for longer than its lock lasts, and goes on afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import genie as package
from support.databases.fenced_accounts import DIALECTS, Accounts, database_url
from support.processes.servers import WAIT_S, Genie

TESTS = Path(__file__).parents[1]


@contextmanager
def paused_holder(port: int, kind: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """One that has locked and read the account, stopped by SIGSTOP."""
    with subprocess.Popen(
        [sys.executable, "-m", "support.databases.fenced_holder", str(port), kind, url],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "read 100\n"
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def resumed(process: subprocess.Popen[str]) -> str:
    """What becomes of its write."""
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate("\n", WAIT_S)
    return said.strip()


@pytest.mark.parametrize("newer", ["has read", "has written"])
@pytest.mark.parametrize("kind", DIALECTS)
async def test_a_stopped_process_that_writes_too_late_is_refused(
    genie: Genie, kind: str, newer: str, tmp_path: Path
) -> None:
    url = database_url(kind, tmp_path)
    accounts = Accounts(kind, url)
    await accounts.create()
    with paused_holder(genie.port, kind, url) as process:
        async with (
            package.connect("127.0.0.1", genie.port) as client,
            client.lock("accounts/1", queue_timeout=WAIT_S, transaction_timeout=WAIT_S) as lock,
        ):
            balance = await accounts.read(lock.fence)
            if newer == "has written":
                await accounts.write(lock.fence, balance + 20)
            assert resumed(process) == "StaleFence"
            if newer == "has read":
                await accounts.write(lock.fence, balance + 20)
    assert await accounts.balance() == 120
    await accounts.engine.dispose()
