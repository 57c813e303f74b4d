"""A real MariaDB for the tests that need one: one server for the whole run, a database for each who asks."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

from support.databases.server import DatabaseServer, find, for_the_run

TIME_ZONE = "+05:30"
"""Not UTC, and no whole hour: who takes the server's time for UTC is seen to be wrong."""


def program(name: str) -> str:
    """Where it is: on the path, or where Debian or Fedora keep the server."""
    return find(name, (Path("/usr/sbin", name), Path("/usr/libexec", name)), "MariaDB's server")


class Mariadb(DatabaseServer):
    """A server that knows nothing of the machine's settings."""

    product = "MariaDB"
    account = "mysql"
    user = "root"
    scheme = "mysql+asyncmy"
    end_signal = signal.SIGTERM

    def run(self, statement: str, database: str | None = None) -> str:
        return super().run(statement, database).replace("\t", "|")

    def _maker(self) -> list[str]:
        command = [program("mariadb-install-db"), "--no-defaults", f"--datadir={self.data}", "--skip-test-db"]
        return [*command, self._tmpdir(), "--auth-root-authentication-method=normal", "--skip-name-resolve"]

    def _server(self) -> list[str]:
        settings = {
            "bind-address": "127.0.0.1",
            "port": self.port,
            "socket": self.folder / "socket",
            "character-set-server": "utf8mb4",
            "default-time-zone": TIME_ZONE,
            "max-connections": 200,
            "innodb-buffer-pool-size": "128M",
            "innodb-flush-log-at-trx-commit": 0,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        command = [program("mariadbd"), "--no-defaults", f"--datadir={self.data}", "--skip-name-resolve"]
        return [*command, self._tmpdir(), *options]

    def _tmpdir(self) -> str:
        """A folder of its own: a server that starts deletes the temporary tables of others, which crash then."""
        return f"--tmpdir={self.folder}"

    def _asks_whether_ready(self) -> list[str]:
        return [program("mariadb-admin"), *self._connects(), "--connect-timeout=1", "ping"]

    def _client(self, statement: str, database: str | None) -> list[str]:
        command = [program("mariadb"), *self._connects(), "--batch", "--skip-column-names", "--execute", statement]
        return [*command, *([database] if database else [])]

    def _connects(self) -> list[str]:
        where = ["--protocol=tcp", "--host=127.0.0.1", f"--port={self.port}", f"--user={self.user}"]
        return ["--no-defaults", *where, "--default-character-set=utf8mb4"]


@functools.cache
def mariadb() -> Mariadb:
    """The server of this run, which is ended with it."""
    return for_the_run(Mariadb)
