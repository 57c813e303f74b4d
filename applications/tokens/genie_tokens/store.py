"""`TokenStore`, the interface that selectors read, and checks that its implementations share."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from genie_tokens.errors import MAX_LISTED_IDS, SpentAlready
from genie_tokens.token import Token


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
    """The change feed reports every change from here on; earlier ones must be read by `unspent`.

    It is the first item of `changes`, and is repeated when changes may have been lost.
    """


Change = Added | Spent | Resync


class TokenStore(Protocol):
    """Stores the tokens of all wallets, and by which transaction each was spent."""

    async def add(self, tokens: Sequence[Token]) -> None:
        """Issue tokens, all or none. Raises ValueError if any of their ids exists already."""

    def unspent(
        self,
        *,
        owner: str | None = None,
        account: str | None = None,
        token_type: str | None = None,
        identifier: str | None = None,
    ) -> AsyncIterator[list[Token]]:
        """Iterate over the unspent tokens, in pages, filtered by the arguments that are not None.

        A token that is unspent during the whole iteration appears exactly once. A token that is
        issued or spent during the iteration may or may not appear.
        """

    async def get(self, ids: Sequence[str]) -> dict[str, Token]:
        """Return the unspent tokens with these ids, by id."""

    def changes(self) -> AsyncIterator[Change]:
        """Iterate over the changes that any process makes, in commit order; begins with `Resync`."""

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        """Spend tokens and issue outputs, all or nothing.

        Idempotent by transaction, so that a spend whose outcome is unknown can be retried. Raises
        SpentAlready if another transaction has spent any of the tokens, and ValueError if a token
        is listed twice or the id of an output exists already. After either error nothing was
        changed.
        """


# -- checks that every store makes -----------------------------------------------------------------------------


def tokens_by_id(tokens: Sequence[Token]) -> dict[str, Token]:
    """Return the tokens by id. Raises ValueError if a token is listed twice."""
    by_id = {token.id: token for token in tokens}
    if len(by_id) != len(tokens):
        counts = Counter(token.id for token in tokens)
        duplicates = [id for id, count in counts.items() if count > 1]
        raise ValueError(f"tokens listed more than once: {id_list(duplicates)}")
    return by_id


def is_first_spend(ids: Iterable[str], spent_by: Mapping[str, str | None], transaction: str) -> bool:
    """Check that a transaction may spend tokens. Returns True if all tokens are unspent. Returns
    False if the transaction has spent all of them: then an earlier attempt of this spend has
    succeeded.

    `spent_by` maps the id of each existing token to the transaction that has spent the token, or to
    None. Raises SpentAlready if a token does not exist, or if another transaction has spent it; the
    error has the ids of these tokens. Also raises SpentAlready, with the ids of the spent tokens,
    if this transaction has spent only some of the tokens.
    """
    spent_by_this: list[str] = []
    unavailable: list[str] = []
    unspent_count = 0
    for id in ids:
        if id not in spent_by:
            unavailable.append(id)
        elif (spender := spent_by[id]) is None:
            unspent_count += 1
        else:
            (spent_by_this if spender == transaction else unavailable).append(id)
    if unavailable or (spent_by_this and unspent_count):
        raise SpentAlready(unavailable or spent_by_this)
    return not spent_by_this


def check_issued(ids: Iterable[str], issued: Mapping[str, object] | set[str], transaction: str) -> None:
    """Check the outputs of a spend that is retried: the first attempt must have issued the same
    outputs. Raises ValueError if any of the outputs' `ids` is not among the `issued` ids.
    """
    missing = [id for id in ids if id not in issued]
    if missing:
        raise ValueError(
            f"transaction {transaction!r} has spent these tokens before, without outputs {id_list(missing)}"
        )


def id_list(ids: Sequence[str]) -> str:
    """Format ids for an error message: the first ten, and how many more there are."""
    more = f" and {len(ids) - MAX_LISTED_IDS} more" if len(ids) > MAX_LISTED_IDS else ""
    return ", ".join(map(repr, ids[:MAX_LISTED_IDS])) + more
