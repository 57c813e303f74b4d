"""Where tokens are kept: what a selector asks of a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from genie.tokens.token import Token


@dataclass(frozen=True, slots=True)
class Added:
    """A token was issued, or is change."""

    token: Token


@dataclass(frozen=True, slots=True)
class Spent:
    """The token with this id is spent."""

    id: str


@dataclass(frozen=True, slots=True)
class Resync:
    """From here on changes are told. What there was before is to be read by `unspent`.

    The first that `changes` tells, and told again where some may have been missed.
    """


Change = Added | Spent | Resync


class TokenStore(Protocol):
    """The tokens of all wallets, and who has spent them."""

    async def add(self, tokens: Sequence[Token]) -> None:
        """Issue tokens, all or none; ValueError where an id is not new."""

    def unspent(
        self,
        *,
        owner: str | None = None,
        account: str | None = None,
        token_type: str | None = None,
        identifier: str | None = None,
    ) -> AsyncIterator[list[Token]]:
        """The tokens that nobody has spent, page by page. What is left out is not looked at.

        A token that is there from the first page to the last is told, and once. One that comes or goes meanwhile may
        be told.
        """

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Those of the tokens that nobody has spent, by id."""

    def changes(self) -> AsyncIterator[Change]:
        """What is added and spent, as it happens and in order, by whatever process; begins with `Resync`."""

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        """Spend tokens and issue outputs, all or nothing.

        SpentAlready, where another transaction was first. The same transaction that spends the same once more has no
        effect: so it can be said again when its outcome is not known. ValueError, where a token is named twice or an output's id
        is not new; then, too, nothing is changed.
        """
