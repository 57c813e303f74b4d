"""Starts a server for each test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.servers import Genie, running_server

NETCAT = """\
import socket, sys, threading
arguments = [argument for argument in sys.argv[1:] if argument != "-N"]
with socket.create_connection((arguments[0], int(arguments[1]))) as sock:
    def send_stdin():
        for line in sys.stdin.buffer:
            sock.sendall(line)
        if "-N" in sys.argv:
            sock.shutdown(socket.SHUT_WR)
    threading.Thread(target=send_stdin, daemon=True).start()
    while data := sock.recv(1 << 16):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
"""
"""A replacement for OpenBSD's nc, with the options that the pages use."""


@pytest.fixture
def genie() -> Iterator[Genie]:
    """A new server, so that its first id is the first id of the page."""
    with running_server() as server:
        yield server


@pytest.fixture
def environment(genie: Genie, tmp_path: Path) -> dict[str, str]:
    netcat = shutil.which("nc")
    if netcat is None or "OpenBSD" not in subprocess.run([netcat, "-h"], capture_output=True, text=True).stderr:  # noqa: PLW1510
        (tmp_path / "nc.py").write_text(NETCAT)
        (tmp_path / "nc").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/nc.py" "$@"\n')
        (tmp_path / "nc").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{clean['PATH']}"
    return clean | {"PATH": path, "GENIE_HOST": genie.address[0], "GENIE_PORT": str(genie.port)}
