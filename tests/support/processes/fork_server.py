"""A process that has imported Genie and forks a program for each order: `python fork_server.py FD`.

Importing Genie takes most of the time of a short command. FD is a socket (SOCK_SEQPACKET). Each message is an order:

- as JSON, `script` (null for a command, which is `main` in the `module` of its `program`), its `arguments`, `environment`
  (all of it), `folder`, `session` (whether it leads a session of its own), and `load`, the modules that it needs and that are imported before the fork,
- as ancillary data, the descriptors of its stdin, stdout and stderr, and of a pipe that gets a line with its process id, and
  when it has ended, a line with its wait status.

It ends when the other end of the socket is closed, and kills what it has started and has not ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

MAX_ORDER = 1 << 20
"""Bytes of an order."""
FILES = 4
"""Descriptors that come with an order."""
LOADED_LATER = (
    "genie.server.app",
    "genie.storage.redis.store",
    "genie.storage.redis.election",
    "aiohttp.web",
    "prometheus_client",
    "uvloop",
)
"""What commands import when they run. Not genie.admin itself: it notes when it is imported as the start of the server."""


def load() -> None:
    """Import what any command needs."""
    from genie.cli import COMMANDS

    for name in COMMANDS:
        importlib.import_module(f"genie.cli.{name}")
    for name in LOADED_LATER:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(orders: socket.socket) -> dict[str, Any]:
    """Carry out orders. Returns in each child, with its order."""
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    running: dict[int, tuple[int, int]] = {}
    """By pidfd: the process id, and the pipe for its status."""
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                pidfd = key.fd
                selector.unregister(pidfd)
                pid, status = running.pop(pidfd)
                tell(status, os.waitpid(pid, 0)[1])
                os.close(pidfd)
                os.close(status)
                continue
            message, files, _, _ = socket.recv_fds(orders, MAX_ORDER, FILES)
            if not message:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            order = json.loads(message)
            for name in order["load"]:
                importlib.import_module(name)
            pid = os.fork()
            if not pid:
                selector.close()
                orders.close()
                for opened in (*running, *(status for _, status in running.values())):
                    os.close(opened)
                begin(order, files)
                return order
            for file in files[:3]:
                os.close(file)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, files[3]
            selector.register(pidfd, selectors.EVENT_READ)


def tell(status: int, number: int) -> None:
    """Write a line to a pipe that nobody may read any more."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, b"%d\n" % number)


def begin(order: dict[str, Any], files: list[int]) -> None:
    """Make this process what was ordered, but for its code."""
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.stdin, sys.stdout, sys.stderr = reading(0), writing(1), writing(2)
    os.chdir(order["folder"])
    time.tzset()
    random.seed()
    if order["session"]:
        os.setsid()
    tell(files[3], os.getpid())  # from now on it can be treated as any other process
    for file in files:
        os.close(file)


def reading(file: int) -> io.TextIOWrapper:
    """Standard input, as Python makes it."""
    return open(file, encoding="utf-8", closefd=False)


def writing(file: int) -> io.TextIOWrapper:
    """Standard output or error, as Python makes it."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    errors = "backslashreplace" if file == 2 else errors or "strict"
    lines = file == 2 or os.isatty(file)
    binary = io.BufferedWriter(io.FileIO(file, "w", closefd=False))
    return io.TextIOWrapper(binary, encoding, errors, line_buffering=lines)


def run(order: dict[str, Any]) -> None:
    """Run what was ordered."""
    sys.argv = [order["script"] or order["program"], *order["arguments"]]
    if order["script"]:
        sys.path[0] = str(Path(order["script"]).parent)
        runpy.run_path(order["script"], run_name="__main__")
    else:
        importlib.import_module(order["module"]).main(prog_name=order["program"])


def end(status: int) -> None:
    """End this process as Python does, but without freeing every object, which takes three times as long as all the rest."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return  # Python itself says what it says then
    os._exit(status & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and those end this
    sys.path[0] = str(Path.cwd())  # as `python -m genie.cli` has it
    with socket.socket(fileno=int(sys.argv[1])) as its_orders:
        load()
        its_order = serve(its_orders)
    try:
        run(its_order)
        end(0)
    except SystemExit as its_end:
        if its_end.code is None or isinstance(its_end.code, int):
            end(its_end.code or 0)
        raise
