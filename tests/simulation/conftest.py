from __future__ import annotations

from collections.abc import Iterator

import pytest

from genie.testing.simulation.loop import SimLoop
from genie.testing.simulation.network import Network


@pytest.fixture
def network() -> Iterator[Network]:
    loop = SimLoop()
    yield Network(loop)
    loop.finish()


@pytest.fixture
def loop(network: Network) -> SimLoop:
    return network.loop
