"""Tokens for tests, and what can be asked of any store of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from genie.tokens.store import TokenStore
from genie.tokens.token import Token


def token(id: str, **fields: Any) -> Token:
    """One of alice's pounds, if nothing else is said."""
    return Token(**({"id": id, "owner": "alice", "token_type": "Fiat", "identifier": "GBP", "amount": 1} | fields))


async def read(pages: AsyncIterator[list[Token]]) -> list[str]:
    """The ids of all pages."""
    return [token.id async for page in pages for token in page]


async def ids(store: TokenStore, **wanted: str) -> set[str]:
    """What is unspent."""
    found = await read(store.unspent(**wanted))
    assert len(found) == len(set(found))
    return set(found)
