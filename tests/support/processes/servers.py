"""Real processes for tests: Redis and Genie on free ports of the loopback."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import orjson

from support.processes.ports import free_port
from support.processes.programs import Forked, check_that_servers_may_start, start_genie

WAIT_S = 120.0
"""A generous time limit for anything that must happen, so that slow machines do not fail."""


REDIS_PROGRAM = "GENIE_TESTS_REDIS_SERVER"
"""The variable with the path of another redis-server, such as a valkey-server, for all tests with a Redis."""

APPEND_ONLY_NAMES = ("appendonlydir", "appendonly.aof")
"""The folder of the append-only files, and the single file of Redis 6."""


def redis_program() -> str:
    """Return the path of the redis-server."""
    program = shutil.which(os.environ.get(REDIS_PROGRAM, "redis-server"))
    assert program, "redis-server is needed: make test installs it"
    return program


@cache
def redis_version() -> tuple[int, ...]:
    """Return the version of the redis-server. That of Valkey is greater than 7.2, the version that it is compatible with."""
    output = subprocess.run([redis_program(), "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, output.partition("v=")[2].split()[0].split(".")))


class Process:
    """A server process; `process` is None while it is down."""

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
    """A redis-server with an append-only file that is never fsynced.

    Acknowledged writes survive a kill of the process, because the kernel has them.
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
        self.wait_until_ready()

    def spawn(self) -> None:
        check_that_servers_may_start()
        program = redis_program()
        self.process = subprocess.Popen([program, *self.arguments()], stdout=subprocess.DEVNULL)

    def arguments(self) -> list[str]:
        return [
            *["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""],
            *["--appendonly", "yes", "--appendfsync", "no", "--loglevel", "warning", *self.options],
        ]

    def wait_until_ready(self) -> None:
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

    def back_up(self) -> None:
        """Copy the append-only file, for `roll_back`."""
        shutil.copytree(self.folder, self._backup, ignore=shutil.ignore_patterns(self._backup.name))

    def roll_back(self) -> None:
        """Replace the append-only file by the copy of `back_up`, while the process is down."""
        for name in APPEND_ONLY_NAMES:
            if (self._backup / name).is_dir():
                shutil.rmtree(self.folder / name)
            if (self._backup / name).exists():
                (self._backup / name).rename(self.folder / name)

    @property
    def _backup(self) -> Path:
        return self.folder / "backup"

    async def node_of(self, _: str = "genie") -> Redis:
        """Return the Redis of a namespace; deployments of several Redises have the same method."""
        return self

    def create_namespace(self, namespace: str = "genie") -> None:
        """Create a namespace whose leader has resigned, so that the first server does not wait for a lease."""
        tag = f"{{{namespace}}}"
        fields = {
            "version": 1,
            "epoch": 1,
            "nonce": "-",
            "node": "",
            "history": "0-0",
            "state": f"{tag}:state:1",
            "checkpoint": "1-0 0 1 1",
            "run_id": self.call("INFO", "server")["run_id"],
        }
        if not self.call("EXISTS", f"{tag}:meta"):
            self.call("XADD", f"{tag}:log", "1-0", "base", "0-0", "node", "")
            self.call("HSET", f"{tag}:state:1", "0", "")
            self.call("HSET", f"{tag}:meta", *(str(part) for pair in fields.items() for part in pair))

    def call(self, *parts: str) -> Any:
        import redis

        with redis.Redis(port=self.port) as client:
            return client.execute_command(*parts)


class RedisDeployment(Protocol):
    """The store of the locks: one Redis, or several."""

    @property
    def url(self) -> str: ...

    def create_namespace(self, namespace: str = "genie") -> None: ...

    async def node_of(self, namespace: str = "genie", /) -> Redis: ...


class Genie(Process):
    """A `genie serve` process. `log` has the log lines that were read so far."""

    def __init__(self, redis: RedisDeployment | None = None, **settings: object) -> None:
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
        self.process = self.spawn(environment)
        self._lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()
        if wait:
            self.until("listening")

    def spawn(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | Forked:
        """Start the process with these environment variables."""
        return start_genie("serve", env=environment, stdout=subprocess.PIPE)

    def _read(self, process: subprocess.Popen[bytes] | Forked, lines_queue: queue.Queue[dict[str, Any] | None]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                lines_queue.put(orjson.loads(line))
        lines_queue.put(None)

    def until(self, event: str) -> dict[str, Any]:
        """Wait for a log line whose event begins with `event`; return it."""
        while True:
            line = self._lines.get(timeout=WAIT_S)
            assert line is not None, f"the server ended before {event!r}: {self.log[-3:]}"
            self.log.append(line)
            if str(line["event"]).startswith(event):
                return line

    def log_so_far(self) -> list[dict[str, Any]]:
        """Read and return all log lines up to now."""
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
    """Run a server. `settings` are environment variables: `log_level="debug"` is GENIE_LOG_LEVEL."""
    genie = Genie(redis, **settings)
    if redis is not None:
        redis.create_namespace(str(settings.get("namespace", "genie")))
    try:
        genie.start()
        yield genie
    finally:
        genie.kill()


def resident_bytes(genie: Genie) -> int:
    """Return the resident memory of the server process, in bytes."""
    assert genie.process is not None
    status = Path(f"/proc/{genie.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024
