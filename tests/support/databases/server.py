"""What the real databases of the tests have in common: one server for the whole run, a database for each who asks."""

from __future__ import annotations

import atexit
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from support.processes.ports import free_port
from support.processes.programs import check_that_servers_may_start
from support.processes.servers import WAIT_S, Process


def find(name: str, kept: Iterable[Path], product: str) -> str:
    """Where a program is: on the path, or at the first of the places where it is kept that has it."""
    found = shutil.which(name) or next((str(path) for path in kept if path.exists()), None)
    assert found, f"{product} is needed, and there is no {name}: make test installs it"
    return found


def _exists(account: str) -> bool:
    try:
        pwd.getpwnam(account)
    except KeyError:
        return False
    return True


class DatabaseServer(Process, ABC):
    """A server whose data are in a folder of its own that goes with it. It does not wait for the disk."""

    product: ClassVar[str]
    account: ClassVar[str]
    """As whom it runs where the tests are root's: it refuses to be root."""
    user: ClassVar[str]
    """As whom one connects to it, without a password."""
    scheme: ClassVar[str]
    """How the URL of a database begins."""
    end_signal: ClassVar[signal.Signals]
    """What makes it break all connections and end."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder = folder
        self.data = folder / "data"
        self._numbers = itertools.count(1)
        self._as: dict[str, Any] = {"cwd": folder}
        if os.geteuid() == 0:
            assert _exists(self.account), f"{self.product} does not run as root, and there is no user {self.account}"
            shutil.chown(folder, self.account, self.account)
            self._as |= {"user": self.account, "group": self.account, "extra_groups": []}

    def make(self) -> None:
        """Make its files."""
        check_that_servers_may_start()
        made = subprocess.run(self._maker(), capture_output=True, text=True, check=False, **self._as)
        assert not made.returncode, made.stdout + made.stderr

    def start(self) -> None:
        """Start it, or start it again with what it had, and wait until one can connect to it."""
        self.process = subprocess.Popen(
            self._server(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._as
        )
        ready = self._asks_whether_ready()
        end = time.monotonic() + WAIT_S
        while subprocess.run(ready, capture_output=True, check=False).returncode:
            assert self.process.poll() is None, f"{self.product} ended while it was starting"
            assert time.monotonic() < end, f"{self.product} did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """Break all connections and end. What was committed is there when it is started again."""
        self.send(self.end_signal)
        assert self.process is not None
        self.process.wait(WAIT_S)
        self.process = None

    def run(self, statement: str, database: str | None = None) -> str:
        """What its own client says to a statement: a line for each row, with `|` between the columns."""
        done = subprocess.run(self._client(statement, database), capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{next(self._numbers)}"
        self.run(f"CREATE DATABASE {name}")
        return f"{self.scheme}://{self.user}@127.0.0.1:{self.port}/{name}"

    @abstractmethod
    def _maker(self) -> list[str]: ...

    @abstractmethod
    def _server(self) -> list[str]: ...

    @abstractmethod
    def _asks_whether_ready(self) -> list[str]: ...

    @abstractmethod
    def _client(self, statement: str, database: str | None) -> list[str]: ...


Server = TypeVar("Server", bound=DatabaseServer)


def for_the_run(kind: type[Server]) -> Server:
    """A server that is ended with this run."""
    folder = tempfile.TemporaryDirectory()
    server = kind(Path(folder.name))

    def end() -> None:
        if server.process is not None:
            server.stop()
        folder.cleanup()

    atexit.register(end)
    server.make()
    server.start()
    return server
