"""No archiver of its own while a test records: the tests archive when they say so."""

from __future__ import annotations

import pytest

from genie.history.writer import HistoryWriter


@pytest.fixture(autouse=True)
def no_archiver(monkeypatch) -> None:
    """Archive only when the test says so, not in another process at any time."""
    monkeypatch.setattr(HistoryWriter, "_archive", lambda _self: None)
