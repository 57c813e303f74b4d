"""Lets the tests of this folder share its modules, and a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import Genie, running_server

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def genie() -> Iterator[Genie]:
    """A fresh server: the first id that it gives is the first that a page shows."""
    with running_server() as server:
        yield server
