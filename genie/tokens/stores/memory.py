"""Tokens in the memory of one process: for tests, for benchmarks, and where the ledger is elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from genie.tokens.store import Added, Change, Spent
from genie.tokens.stores.change_feed import Feed, Feeds
from genie.tokens.stores.spending import can_spend, check_issued, distinct, some
from genie.tokens.token import Token, Wallet, wallets_of

PAGE = 1000
"""Tokens in a page of `unspent`."""

SLACK = 64
"""Spent tokens that a shelf may have beyond as many as there are unspent ones."""


class _Shelf:
    """The tokens of one wallet as they came, with some that are spent by now.

    What was spent is taken out when it is most of what there is: spending costs the same however many there are, and
    somebody who walks along the shelf has the list that it began with.
    """

    __slots__ = ("tokens", "unspent")

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.unspent = 0


class MemoryTokenStore:
    """A `TokenStore` in memory. Who has spent which token is remembered as long as it lives."""

    def __init__(self) -> None:
        self._unspent: dict[str, Token] = {}
        self._spent_by: dict[str, str] = {}
        self._shelves: dict[Wallet, _Shelf] = {}
        self._feeds = Feeds()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all feeds. The tokens stay."""
        self._feeds.end()

    async def add(self, tokens: Sequence[Token]) -> None:
        """Issue tokens, all or none; ValueError where an id is not new."""
        self._check_new(distinct(tokens))
        self._issue(tokens)
        if self._feeds:
            self._feeds.tell([Added(token) for token in tokens])

    async def unspent(
        self,
        *,
        owner: str | None = None,
        account: str | None = None,
        token_type: str | None = None,
        identifier: str | None = None,
    ) -> AsyncIterator[list[Token]]:
        """The tokens that nobody has spent, page by page. What is left out is not looked at."""
        asked = Wallet(token_type or "", identifier or "", owner, None if owner is not None else account)
        if token_type is not None and identifier is not None and (owner is not None or account is not None):
            shelves = [self._shelves[asked]] if asked in self._shelves else []
        else:
            shelves = [
                shelf
                for wallet, shelf in self._shelves.items()
                if (wallet.account is None if asked.account is None else wallet.account == account)
                and (owner is None or wallet.owner == owner)
                and (token_type is None or wallet.token_type == token_type)
                and (identifier is None or wallet.identifier == identifier)
            ]
        for shelf in shelves:
            tokens = shelf.tokens
            for start in range(0, len(tokens), PAGE):
                page = [token for token in tokens[start : start + PAGE] if token.id in self._unspent]
                if owner is not None and account is not None:
                    page = [token for token in page if token.account == account]
                if page:
                    yield page
                await asyncio.sleep(0)

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Those of the tokens that nobody has spent, by id."""
        return {id: self._unspent[id] for id in ids if id in self._unspent}

    def changes(self) -> Feed:
        """What is added and spent, from this call on, in order; begins with `Resync`."""
        return self._feeds.open()

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        """Spend tokens and issue outputs, all or nothing; SpentAlready, where another transaction was first."""
        ids, new = distinct(tokens), distinct(outputs)
        if not ids:
            raise ValueError("there is no token to spend")
        known: dict[str, str | None] = {id: self._spent_by.get(id) for id in ids if self._has(id)}
        if not can_spend(ids, known, transaction):
            check_issued(new, {id for id in new if self._has(id)}, transaction)
            return
        self._check_new(new)
        for id in ids:
            token = self._unspent.pop(id)
            self._spent_by[id] = transaction
            self._clear(token)
        self._issue(outputs)
        if self._feeds:
            told: list[Change] = [Spent(id) for id in ids]
            self._feeds.tell(told + [Added(token) for token in outputs])

    def _has(self, id: str) -> bool:
        return id in self._unspent or id in self._spent_by

    def _check_new(self, ids: dict[str, Token]) -> None:
        there = [id for id in ids if self._has(id)]
        if there:
            raise ValueError(f"there already: {some(there)}")

    def _issue(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            self._unspent[token.id] = token
            for wallet in wallets_of(token):
                shelf = self._shelves.get(wallet)
                if shelf is None:
                    shelf = self._shelves[wallet] = _Shelf()
                shelf.tokens.append(token)
                shelf.unspent += 1

    def _clear(self, token: Token) -> None:
        """Take a token that is spent off its shelves, or leave it there for later."""
        for wallet in wallets_of(token):
            shelf = self._shelves[wallet]
            shelf.unspent -= 1
            if not shelf.unspent:
                del self._shelves[wallet]
            elif len(shelf.tokens) > 2 * shelf.unspent + SLACK:
                shelf.tokens = [each for each in shelf.tokens if each.id in self._unspent]
