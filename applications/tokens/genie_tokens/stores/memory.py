"""A token store in memory: for tests, benchmarks, and ledgers whose durable copy is elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Self

from genie_tokens.issue_observers import IssueObservers
from genie_tokens.store import Added, Change, Spent, check_issued, id_list, is_first_spend, tokens_by_id
from genie_tokens.stores.change_feed import ChangeFeed, ChangeFeeds
from genie_tokens.token import Token, Wallet, wallets_of

PAGE = 1000
"""Tokens in a page of `unspent`."""

MAX_STALE_TOKENS = 64
"""A wallet's list is compacted when it is longer than this plus twice the number of unspent tokens:
then most of it is spent.
"""


class _IssuedTokens:
    """The tokens of one wallet in the order in which they were issued, including some spent ones.

    When most of the list is spent it is replaced by a compacted one. So spending takes constant
    time on average, and an iteration in progress is not disturbed.
    """

    __slots__ = ("tokens", "unspent_count")

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        """In the order in which they were issued; includes spent tokens until the list is compacted."""
        self.unspent_count = 0


class MemoryTokenStore:
    """A `TokenStore` in memory. The ids of spent tokens are never deleted."""

    def __init__(self) -> None:
        self._unspent_by_id: dict[str, Token] = {}
        self._spent_by: dict[str, str] = {}
        """By id of a spent token: the transaction that has spent the token."""
        self._issued_by_wallet: dict[Wallet, _IssuedTokens] = {}
        """The issued tokens of each wallet that has unspent tokens."""
        self._feeds = ChangeFeeds()
        self.issue_observers = IssueObservers()
        """Selectors of this process, which see added tokens at once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all change feeds. The tokens are kept."""
        self._feeds.end()

    async def add(self, tokens: Sequence[Token]) -> None:
        """Issue tokens, all or none. Raises ValueError if any of their ids exists already."""
        self._check_new(tokens_by_id(tokens))
        with self.issue_observers.issuing(tokens):
            self._issue(tokens)
        if self._feeds:
            self._feeds.publish([Added(token) for token in tokens])

    async def unspent(
        self,
        *,
        owner: str | None = None,
        account: str | None = None,
        token_type: str | None = None,
        identifier: str | None = None,
    ) -> AsyncIterator[list[Token]]:
        """Iterate over the unspent tokens, in pages, filtered by the arguments that are not None.

        Reads only one wallet if the arguments determine the wallet, and searches all wallets
        otherwise.
        """
        by_account = owner is None and account is not None
        if token_type is not None and identifier is not None and (owner is not None or account is not None):
            wallet = Wallet(token_type, identifier, owner, account if by_account else None)
            issued_lists = [self._issued_by_wallet[wallet]] if wallet in self._issued_by_wallet else []
        else:
            # Each token is in an owner's wallet, and perhaps in an account's wallet: search wallets of one kind only,
            # so that no token is found twice.
            issued_lists = [
                issued
                for wallet, issued in self._issued_by_wallet.items()
                if (wallet.account == account if by_account else wallet.account is None)
                and (owner is None or wallet.owner == owner)
                and (token_type is None or wallet.token_type == token_type)
                and (identifier is None or wallet.identifier == identifier)
            ]
        for issued in issued_lists:
            tokens = issued.tokens
            for start in range(0, len(tokens), PAGE):
                page = [token for token in tokens[start : start + PAGE] if token.id in self._unspent_by_id]
                if owner is not None and account is not None:  # the list is that of the owner's wallet
                    page = [token for token in page if token.account == account]
                if page:
                    yield page
                await asyncio.sleep(0)  # lets other tasks run between two pages

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Return the unspent tokens with these ids, by id."""
        return {id: self._unspent_by_id[id] for id in ids if id in self._unspent_by_id}

    def changes(self) -> ChangeFeed:
        """Iterate over the changes from this call on, in order; begins with `Resync`."""
        return self._feeds.open()

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        """Spend tokens and issue outputs, all or nothing. Has no effect if the same spend has
        succeeded before.

        Raises SpentAlready if another transaction has spent any of the tokens. Raises ValueError if
        `tokens` is empty or has duplicates, or if the outputs can't be issued.
        """
        spent, new = tokens_by_id(tokens), tokens_by_id(outputs)
        if not spent:
            raise ValueError("tokens must contain at least one token to spend")
        spent_by: dict[str, str | None] = {id: self._spent_by.get(id) for id in spent if self._exists(id)}
        if not is_first_spend(spent, spent_by, transaction):  # a retry of a spend that has succeeded
            check_issued(new, {id for id in new if self._exists(id)}, transaction)
            return
        self._check_new(new)
        for id in spent:
            token = self._unspent_by_id.pop(id)
            self._spent_by[id] = transaction
            self._remove(token)
        self._issue(outputs)
        if self._feeds:
            changes: list[Change] = [Spent(id) for id in spent]
            self._feeds.publish(changes + [Added(token) for token in outputs])

    def _exists(self, id: str) -> bool:
        return id in self._unspent_by_id or id in self._spent_by

    def _check_new(self, ids: Iterable[str]) -> None:
        """Raise ValueError if any of these ids exists already."""
        existing = [id for id in ids if self._exists(id)]
        if existing:
            raise ValueError(f"tokens exist already: {id_list(existing)}")

    def _issue(self, tokens: Sequence[Token]) -> None:
        """Add tokens to the unspent tokens, and to the lists of their wallets."""
        for token in tokens:
            self._unspent_by_id[token.id] = token
            for wallet in wallets_of(token):
                issued = self._issued_by_wallet.get(wallet)
                if issued is None:
                    issued = self._issued_by_wallet[wallet] = _IssuedTokens()
                issued.tokens.append(token)
                issued.unspent_count += 1

    def _remove(self, token: Token) -> None:
        """Subtract a spent token from the counts of its wallets. Compacts the list of a wallet if
        most tokens in the list are spent.
        """
        for wallet in wallets_of(token):
            issued = self._issued_by_wallet[wallet]
            issued.unspent_count -= 1
            if not issued.unspent_count:
                del self._issued_by_wallet[wallet]
            elif len(issued.tokens) > 2 * issued.unspent_count + MAX_STALE_TOKENS:
                issued.tokens = [token for token in issued.tokens if token.id in self._unspent_by_id]
