from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from genie import Client, connect
from support.network.wire import Wire
from support.processes.servers import WAIT_S, Genie, Redis, running_redis, running_server


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    """A server on the memory store, shared by a file's tests: each uses names of its own."""
    with running_server() as server:
        yield server


@pytest.fixture
async def client(genie: Genie) -> AsyncIterator[Client]:
    async with asyncio.timeout(WAIT_S), connect(*genie.address) as client:
        yield client


@pytest.fixture
async def other(genie: Genie) -> AsyncIterator[Client]:
    """A second client of the same server."""
    async with asyncio.timeout(WAIT_S), connect(*genie.address) as client:
        yield client


@pytest.fixture
def redis() -> Iterator[Redis]:
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
async def _close_wires() -> AsyncIterator[None]:
    yield
    while Wire.made:
        await Wire.made.pop().close()
