"""Databases with enough memory for a large ledger, whose commits wait for the disk: the test
servers with other settings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scale_parts.report import Missing

from support.databases.mariadb import Mariadb
from support.databases.postgres import Postgres
from support.databases.server import DatabaseServer


class LargeMariadb(Mariadb):
    """The default buffer pool of 128 MB holds a seventh of the ledger."""

    def _server(self) -> list[str]:
        return [*super()._server(), "--innodb-buffer-pool-size=2G", "--innodb-flush-log-at-trx-commit=1"]


class LargePostgres(Postgres):
    """Shared memory as the manual recommends."""

    def _server(self) -> list[str]:
        return [*super()._server(), "-c", "fsync=on", "-c", "shared_buffers=1GB", "-c", "max_wal_size=4GB"]


@contextmanager
def database_of(kind: type[DatabaseServer]) -> Iterator[str]:
    """Start a server for the block, and yield the URL of an empty database."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            server = kind(Path(folder))
            server.make()
            server.start()
        except AssertionError as missing:
            raise Missing(str(missing)) from None
        try:
            yield server.new_database()
        finally:
            server.stop()


@contextmanager
def sqlite_file() -> Iterator[str]:
    """Yield the URL of an SQLite file that does not exist yet."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/ledger.db"
