from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ledgers import KINDS, Books


@pytest.fixture(params=KINDS)
async def empty_books(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Books]:
    """An empty database."""
    books = Books(request.param, tmp_path)
    yield books
    await books.close()


@pytest.fixture
async def books(empty_books: Books) -> Books:
    """A ledger without transfers."""
    return await empty_books.create()
