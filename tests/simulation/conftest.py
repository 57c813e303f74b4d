from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from genie.testing.simulation.loop import SimLoop
from genie.testing.simulation.network import Network

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    loop = SimLoop()
    Network(loop)
    yield loop
    loop.finish()
