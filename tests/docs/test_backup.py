"""Execute the commands of docs/how-to/backup.md with two Redises."""

from __future__ import annotations

import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from matching import Screen
from pages import ROOT, blocks

from support.network.wire import Wire
from support.processes.servers import WAIT_S, Genie, running_redis

PAGE = "docs/how-to/backup.md"


@pytest.mark.server
async def test_the_commands_of_the_page(environment: dict[str, str], tmp_path: Path) -> None:
    found = blocks(PAGE)
    shown = dict(pairwise(found))
    with running_redis() as first, running_redis() as second:
        server = Genie(first, lease=0.3, namespace="orders")
        server.start()
        wire = await Wire.connect(server.address)
        await wire.lock("exclusive:a", transactionTimeout=600_000)
        await wire.close()
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        for block in (block for block in found if block.language == "sh"):
            command = block.text
            for host, redis in (("redis-1", first), ("redis-2", second)):
                command = command.replace(f"--redis-host {host}", f"--redis-host 127.0.0.1 --redis-port {redis.port}")
                command = command.replace(f"-h {host}", f"-h 127.0.0.1 -p {redis.port}")
            assert "redis-1" not in command
            done = subprocess.run(  # noqa: ASYNC221
                ["bash", "-euo", "pipefail", "-c", command],
                env=environment | {"PYTHONPATH": str(ROOT)},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            output = shown.get(block)
            if output is not None and output.language == "text":
                Screen().match_all(output.lines, done.stdout.splitlines())
        assert done.stdout.splitlines()[-1] == "sound"
        moved = Genie(second, lease=0.3, namespace="orders")
        moved.start()
        assert moved.log[-1]["held_locks"] == 1
        moved.kill()
