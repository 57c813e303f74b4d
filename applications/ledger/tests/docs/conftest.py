from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.processes.servers import Genie, running_server


@pytest.fixture
def genie() -> Iterator[Genie]:
    with running_server() as server:
        yield server
