"""A durable redis-server: append-only, synced once a second."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.peer import HOST, Running
from benchmarks.peers.processes import accepts, free_port, serving


def missing() -> str | None:
    """Return why no redis-server can be started; None if it can."""
    return None if shutil.which("redis-server") else "redis-server is not installed"


@contextmanager
def redis_server(folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
    """Start a redis-server with its data in this folder."""
    port = free_port()
    command = [
        *prefix,
        *["redis-server", "--port", str(port), "--bind", HOST, "--dir", str(folder), "--save", ""],
        *["--appendonly", "yes", "--appendfsync", "everysec"],
    ]
    said = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout  # noqa: S607
    version = next(word.removeprefix("v=") for word in said.split() if word.startswith("v="))
    with serving(command, folder / "redis.log", lambda: accepts(port)) as pid:
        yield Running(port, (pid,), (f"Redis {version}",))
