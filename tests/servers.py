"""Real processes for tests: Redis and Genie on free ports of the loopback, ended by their own ids."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import orjson

from ports import free_port
from programs import Forked, check_that_servers_may_start, start_genie

WAIT_S = 120.0
"""How long anything may take that happens at all: a bound, not a measure."""


class Process:
    """A server of its own process, or of none while it is down."""

    process: subprocess.Popen[bytes] | Forked | None = None

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Redis(Process):
    """A redis-server with an append-only file that is never synced: what it has answered for outlives its own death, for the
    kernel has it by then, and the disk is waited for by nobody.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.folder = folder
        self.options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.spawn()
        self.until_it_answers()

    def spawn(self) -> None:
        check_that_servers_may_start()
        program = shutil.which("redis-server")
        assert program, "redis-server is needed: make test installs it"
        self.process = subprocess.Popen([program, *self.arguments()], stdout=subprocess.DEVNULL)

    def arguments(self) -> list[str]:
        return [
            *["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""],
            *["--appendonly", "yes", "--appendfsync", "no", "--loglevel", "warning", *self.options],
        ]

    def until_it_answers(self) -> None:
        assert self.process is not None
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as sock:
                    sock.sendall(b"PING\r\n")
                    if sock.recv(64).startswith(b"+PONG"):
                        break
            except OSError:
                pass
            assert self.process.poll() is None, f"redis-server did not start at {self.port}"
            time.sleep(0.01)
        assert self.process.poll() is None, f"another server is at {self.port}"

    async def home(self, _: str = "genie") -> Redis:
        """Where a namespace is: of several servers one would be asked for."""
        return self

    def found(self, namespace: str = "genie") -> None:
        """Found a namespace whose leader has resigned, so that the first server need not wait whether one lives."""
        tag = f"{{{namespace}}}"
        fields = {
            "epoch": 1,
            "nonce": "-",
            "records": f"{tag}:records:1",
            "counters": "0 0 1 1",
            "base": "0-0",
            "node": "",
        }
        if not self.call("EXISTS", f"{tag}:meta"):
            self.call("HSET", f"{tag}:meta", *(str(part) for pair in fields.items() for part in pair))

    def call(self, *parts: str) -> Any:
        import redis

        with redis.Redis(port=self.port) as client:
            return client.execute_command(*parts)


class Ground(Protocol):
    """Whatever the locks are kept in: one Redis, or several."""

    @property
    def url(self) -> str: ...

    def found(self, namespace: str = "genie") -> None: ...

    async def home(self, namespace: str = "genie", /) -> Redis: ...


class Genie(Process):
    """A `genie serve`, with its log lines as they come."""

    def __init__(self, redis: Ground | None = None, **settings: object) -> None:
        self.settings = {"port": free_port(), "admin_port": "", **settings}
        self.redis_url = None if redis is None else redis.url
        self.log: list[dict[str, Any]] = []
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    @property
    def port(self) -> int:
        return int(str(self.settings["port"]))

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def start(self, wait: bool = True) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
        environment |= {f"GENIE_{name.upper()}": str(value) for name, value in self.settings.items()}
        if self.redis_url is not None:
            environment["GENIE_REDIS_URL"] = self.redis_url
        self.process = start_genie("serve", env=environment, stdout=subprocess.PIPE)
        self._lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()
        if wait:
            self.until("listening")

    def _read(self, process: subprocess.Popen[bytes] | Forked, into: queue.Queue[dict[str, Any] | None]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                into.put(orjson.loads(line))
        into.put(None)

    def until(self, event: str) -> dict[str, Any]:
        """Wait until a log line begins so."""
        while True:
            line = self._lines.get(timeout=WAIT_S)
            assert line is not None, f"the server ended before {event!r}: {self.log[-3:]}"
            self.log.append(line)
            if str(line["event"]).startswith(event):
                return line

    def said(self) -> list[dict[str, Any]]:
        """All log lines by now."""
        with suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                self.log.append(line)
        return self.log

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(WAIT_S)


@contextmanager
def running_redis(*options: str) -> Iterator[Redis]:
    with tempfile.TemporaryDirectory() as folder:
        redis = Redis(Path(folder), *options)
        try:
            redis.start()
            yield redis
        finally:
            redis.kill()


@contextmanager
def running_server(redis: Redis | None = None, **settings: object) -> Iterator[Genie]:
    """`settings` as the variables are named: `log_level="debug"` is GENIE_LOG_LEVEL."""
    genie = Genie(redis, **settings)
    if redis is not None:
        redis.found(str(settings.get("namespace", "genie")))
    try:
        genie.start()
        yield genie
    finally:
        genie.kill()


def resident(genie: Genie) -> int:
    """Bytes of memory that the server's process has."""
    assert genie.process is not None
    status = Path(f"/proc/{genie.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024
