from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
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


@pytest.fixture
async def new_books(tmp_path: Path) -> AsyncIterator[Callable[[str], Awaitable[Books]]]:
    """Makes a ledger without transfers, of the kind that is told."""
    made: list[Books] = []

    async def new(kind: str) -> Books:
        made.append(Books(kind, tmp_path))
        return await made[-1].create()

    yield new
    for books in made:
        await books.close()
