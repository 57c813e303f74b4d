"""A real PostgreSQL for the tests that need one: one server for the whole run, a database for each who asks."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

from support.databases.server import DatabaseServer, find, for_the_run


def program(name: str) -> str:
    """Where it is: on the path, or where Debian keeps it, of the newest version."""
    kept = Path("/usr/lib/postgresql").glob(f"*/bin/{name}")
    return find(name, sorted(kept, key=lambda path: int(path.parts[-3]), reverse=True), "PostgreSQL's server")


class Postgres(DatabaseServer):
    """A cluster of its own."""

    product = "PostgreSQL"
    account = "postgres"
    user = "postgres"
    scheme = "postgresql+asyncpg"
    end_signal = signal.SIGINT

    def _maker(self) -> list[str]:
        command = [program("initdb"), "--pgdata", str(self.data), "--auth=trust", "--no-sync"]
        return [*command, f"--username={self.user}", "--encoding=UTF8", "--locale=C"]

    def _server(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": 200,
            "log_min_messages": "fatal",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [program("postgres"), "-D", str(self.data), *options]

    def _asks_whether_ready(self) -> list[str]:
        return [program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]

    def _client(self, statement: str, database: str | None) -> list[str]:
        command = [program("psql"), "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-c", statement]
        return [*command, "-h", "127.0.0.1", "-p", str(self.port), "-U", self.user, database or "postgres"]


@functools.cache
def postgres() -> Postgres:
    """The server of this run, which is ended with it."""
    return for_the_run(Postgres)
