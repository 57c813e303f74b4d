"""Databases with memory for a large ledger, and commits that wait for the disk: the servers are those of the tests."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scale_parts.report import Missing

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from databases import DatabaseServer
from mariadb import Mariadb
from postgres import Postgres


class LargeMariadb(Mariadb):
    """Its default of 128 MB holds a seventh of the ledger."""

    def _server(self) -> list[str]:
        return [*super()._server(), "--innodb-buffer-pool-size=2G", "--innodb-flush-log-at-trx-commit=1"]


class LargePostgres(Postgres):
    """With the shared memory that its manual advises."""

    def _server(self) -> list[str]:
        return [*super()._server(), "-c", "fsync=on", "-c", "shared_buffers=1GB", "-c", "max_wal_size=4GB"]


@contextmanager
def database_of(kind: type[DatabaseServer]) -> Iterator[str]:
    """The URL of an empty database of a server that is there until the block ends."""
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
    """The URL of a file that is not there yet."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/ledger.db"
