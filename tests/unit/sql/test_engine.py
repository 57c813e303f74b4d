"""genie.sql.engine: cancellation while a connection opens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import URL, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from genie.sql import engine as sql_engine
from genie.sql.engine import open_connection
from genie.sql.sqlite import file_engine


@pytest.mark.parametrize("moment", ["first_connect", "connect", "checkout", "reset", "checkin"])
async def test_a_connection_is_returned_if_the_task_is_cancelled(tmp_path: Path, moment: str) -> None:
    """In autocommit mode SQLAlchemy still waits for the driver after the checkout, to set that mode."""
    url = URL.create("sqlite+aiosqlite", database=str(tmp_path / "some.db"))
    engine = file_engine(url, lock_timeout_s=5, pool_size=1, hint="name a file")
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")

    async def query() -> None:
        async with open_connection(autocommit) as connection:
            await connection.execute(text("SELECT 1"))

    task = asyncio.create_task(query())
    event.listen(engine.sync_engine, moment, lambda *_: task.cancel())
    await asyncio.wait({task})
    assert task.cancelled()
    async with asyncio.timeout(120), open_connection(engine) as connection:  # the pool's only connection
        assert (await connection.execute(text("SELECT 1"))).scalar_one() == 1
    await engine.dispose()


async def test_a_cancellation_does_not_wait_for_a_server_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_engine, "OPEN_GRACE_S", 0)
    connected = asyncio.Event()
    server = await asyncio.start_server(lambda *_: connected.set(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = create_async_engine(f"postgresql+asyncpg://u:p@127.0.0.1:{port}/d", connect_args={"timeout": 3600})

    async def query() -> None:
        async with open_connection(engine):
            pytest.fail("the server does not respond")

    task = asyncio.create_task(query())
    async with asyncio.timeout(120):
        await connected.wait()
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()
    server.close()
    await engine.dispose()
