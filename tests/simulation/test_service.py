"""`genie.testing`, which users have for the tests of their services."""

from __future__ import annotations

import asyncio
import random
import secrets
import time

import pytest

import genie
import genie.testing


def test_virtual_time_and_timeouts_advance_together() -> None:
    async def main() -> tuple[bool, float, float]:
        started_at = time.time(), time.monotonic()
        async with genie.connect() as client:
            lock = await client.acquire("accounts/2", transaction_timeout=3600)
            await asyncio.sleep(3599)
            assert not lock.lost.is_set()
            await asyncio.sleep(2)
            return lock.lost.is_set(), time.time() - started_at[0], time.monotonic() - started_at[1]

    assert genie.testing.run(main()) == (True, 3601, 3601)


def test_environment_variables_of_other_servers_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with genie.connect() as client:
            await client.ping()

    for name, value in (("HOST", "192.0.2.1"), ("TOKEN", "of-another-server"), ("NAMESPACE", "of-another-server")):
        monkeypatch.setenv(f"GENIE_{name}", value)
    genie.testing.run(main())


def test_a_run_is_reproducible() -> None:
    async def main() -> list[object]:
        async with genie.connect("localhost:7077") as client, client.lock("a") as lock:
            return [lock.id, lock.fence, random.random(), secrets.token_hex(), time.time_ns()]

    assert genie.testing.run(main()) == genie.testing.run(main())
    assert genie.testing.run(main()) != genie.testing.run(main(), seed=1)


def test_services_can_connect_to_each_other() -> None:
    async def main() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 8080):
            reader, writer = await asyncio.open_connection("127.0.0.1", 8080)
            writer.write(b"hello\n")
            data = await reader.read()
            writer.close()
            return data

    assert genie.testing.run(main()) == b"hello\n"


def test_waiting_forever_raises_stuck() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(genie.testing.Stuck):
        genie.testing.run(main())


def test_errors_propagate_and_clocks_are_restored() -> None:
    async def main() -> None:
        raise ValueError("of the service")

    before = time.time, random.getstate()
    with pytest.raises(ValueError, match="of the service"):
        genie.testing.run(main())
    assert (time.time, random.getstate()) == before


async def test_a_server_in_the_running_loop() -> None:
    async with genie.testing.server() as (host, port), genie.connect(host, port) as client, client.lock("a") as lock:
        assert lock.fence
