"""Tokens for tests, and queries of token stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from genie_tokens.store import TokenStore
from genie_tokens.token import Token


def token(id: str, **fields: Any) -> Token:
    """Return a token; by default it is 1 GBP of the owner alice."""
    return Token(**({"id": id, "owner": "alice", "token_type": "Fiat", "identifier": "GBP", "amount": 1} | fields))


async def read(pages: AsyncIterator[list[Token]]) -> list[str]:
    """Return the ids in all pages."""
    return [token.id async for page in pages for token in page]


async def ids(store: TokenStore, **filters: str) -> set[str]:
    """Return the ids of the unspent tokens of a store, each of which must appear once."""
    found = await read(store.unspent(**filters))
    assert len(found) == len(set(found))
    return set(found)
