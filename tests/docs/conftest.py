"""Adds this folder to the import path, and starts a server for each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import Genie, running_server

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def genie() -> Iterator[Genie]:
    """A new server, so that its first id is the first id of the page."""
    with running_server() as server:
        yield server
