from __future__ import annotations

from collections.abc import Iterator

import pytest

from servers import Genie, Redis, running_redis, running_server


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    """A server on the memory store, shared by a file's tests: each uses names of its own."""
    with running_server() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[Redis]:
    with running_redis() as server:
        yield server
