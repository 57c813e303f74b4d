"""What a selector requires of a token store, and the checks that stores share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from genie.tokens.errors import SpentAlready
from genie.tokens.token import Token


@dataclass(frozen=True, slots=True)
class Added:
    """A token was issued."""

    token: Token


@dataclass(frozen=True, slots=True)
class Spent:
    """The token with this id was spent."""

    id: str


@dataclass(frozen=True, slots=True)
class Resync:
    """Every later change is reported; what was there before must be read by `unspent`.

    The first item of `changes`, repeated after changes may have been lost.
    """


Change = Added | Spent | Resync


class TokenStore(Protocol):
    """The tokens of all wallets, and which transactions have spent them."""

    async def add(self, tokens: Sequence[Token]) -> None:
        """Issue tokens, all or none. ValueError if an id exists."""

    def unspent(
        self,
        *,
        owner: str | None = None,
        account: str | None = None,
        token_type: str | None = None,
        identifier: str | None = None,
    ) -> AsyncIterator[list[Token]]:
        """Iterate over the unspent tokens, in pages. Arguments that are None don't restrict it.

        A token that is unspent from the first page to the last appears exactly once. One that is
        issued or spent meanwhile may appear.
        """

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Return those of the tokens that are unspent, by id."""

    def changes(self) -> AsyncIterator[Change]:
        """Iterate over what any process adds and spends, in commit order; begins with `Resync`."""

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        """Spend tokens and issue outputs, all or nothing.

        Idempotent by transaction, so that it can be repeated if its outcome is unknown.
        SpentAlready if another transaction was first. ValueError if a token is named twice, or the
        id of an output exists. After either error nothing was changed.
        """


# -- checks that every store makes -----------------------------------------------------------------------------


def distinct(tokens: Sequence[Token]) -> dict[str, Token]:
    """Return the tokens by id. ValueError if one is named twice."""
    by_id = {token.id: token for token in tokens}
    if len(by_id) != len(tokens):
        seen: set[str] = set()
        twice = [token.id for token in tokens if token.id in seen or seen.add(token.id)]  # type: ignore[func-returns-value]
        raise ValueError(f"tokens named more than once: {id_list(twice)}")
    return by_id


def validate_spend(ids: Iterable[str], spent_by: Mapping[str, str | None], transaction: str) -> bool:
    """Return whether the tokens can be spent; False if this transaction has spent them all before.

    `spent_by` maps the id of each token that was ever issued to the transaction that has spent it.
    SpentAlready names the tokens that others have spent and those that never existed; it names the
    transaction's own if it has spent only some, since they would count twice.
    """
    own: list[str] = []
    others: list[str] = []
    free = 0
    for id in ids:
        if id not in spent_by:
            others.append(id)
        elif (by := spent_by[id]) is None:
            free += 1
        else:
            (own if by == transaction else others).append(id)
    if others or (own and free):
        raise SpentAlready(others or own)
    return not own


def check_issued(ids: Iterable[str], issued: Mapping[str, object] | set[str], transaction: str) -> None:
    """Raise ValueError if a transaction that has spent its tokens before did so without these
    outputs.
    """
    absent = [id for id in ids if id not in issued]
    if absent:
        raise ValueError(
            f"transaction {transaction!r} has spent these tokens before, without outputs {id_list(absent)}"
        )


def id_list(ids: Sequence[str]) -> str:
    """Return the first ten ids for an error message."""
    more = f" and {len(ids) - 10} more" if len(ids) > 10 else ""  # noqa: PLR2004
    return ", ".join(map(repr, ids[:10])) + more
