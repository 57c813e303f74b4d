"""A real PostgreSQL for the tests that need one: one server for the whole run, a database for each who asks."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from servers import WAIT_S, Process, free_port

ACCOUNT = "postgres"
"""As whom it runs where the tests are root's: it refuses to be root."""

_numbers = itertools.count(1)


def program(name: str) -> str:
    """Where it is: on the path, or where Debian keeps it."""
    kept = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    found = shutil.which(name) or (str(kept[-1]) if kept else None)
    assert found, "PostgreSQL's server is needed: make test installs it"
    return found


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


class Postgres(Process):
    """A cluster of its own in a folder that goes with it. It does not wait for the disk."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.data = folder / "data"
        self._as: dict[str, Any] = {"cwd": folder}
        if os.geteuid() == 0:
            assert _exists(ACCOUNT), f"PostgreSQL does not run as root, and there is no user {ACCOUNT}"
            shutil.chown(folder, ACCOUNT, ACCOUNT)
            self._as |= {"user": ACCOUNT, "group": ACCOUNT, "extra_groups": []}

    def make(self) -> None:
        command = [program("initdb"), "--pgdata", str(self.data), "--auth=trust", "--no-sync", "--username=postgres"]
        command += ["--encoding=UTF8", "--locale=C"]
        made = subprocess.run(command, capture_output=True, text=True, check=False, **self._as)
        assert not made.returncode, made.stderr

    def start(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": 200,
            "log_min_messages": "fatal",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self.process = subprocess.Popen(
            [program("postgres"), "-D", str(self.data), *options], stderr=subprocess.DEVNULL, **self._as
        )
        ready = [program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        end = time.monotonic() + WAIT_S
        while subprocess.run(ready, check=False).returncode:
            assert self.process.poll() is None, "PostgreSQL ended while it was starting"
            assert time.monotonic() < end, "PostgreSQL did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """Break all connections and end."""
        self.send(signal.SIGINT)
        assert self.process is not None
        self.process.wait(WAIT_S)
        self.process = None

    def run(self, statement: str, database: str = "postgres") -> str:
        """What psql says to a statement."""
        command = [program("psql"), "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-c", statement]
        command += ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", database]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{next(_numbers)}"
        self.run(f"CREATE DATABASE {name}")
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/{name}"


@functools.cache
def postgres() -> Postgres:
    """The server of this run, which is ended with it."""
    folder = tempfile.TemporaryDirectory()
    server = Postgres(Path(folder.name))

    def end() -> None:
        if server.process is not None:
            server.stop()
        folder.cleanup()

    atexit.register(end)
    server.make()
    server.start()
    return server
