"""What every store finds out before it spends: which tokens are named, and whether they can be spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from genie.tokens.errors import SpentAlready
from genie.tokens.token import Token


def distinct(tokens: Sequence[Token]) -> dict[str, Token]:
    """The tokens by id; ValueError where one is named twice."""
    by_id = {token.id: token for token in tokens}
    if len(by_id) != len(tokens):
        seen: set[str] = set()
        twice = [token.id for token in tokens if token.id in seen or seen.add(token.id)]  # type: ignore[func-returns-value]
        raise ValueError(f"named more than once: {some(twice)}")
    return by_id


def can_spend(ids: Iterable[str], spent_by: Mapping[str, str | None], transaction: str) -> bool:
    """Whether the tokens are there to be spent; False where this transaction has spent them all before.

    `spent_by` says who has spent each token that was ever issued. SpentAlready names those that others have spent and
    those that never were. It names a transaction's own where it has spent only some of them: they would count twice.
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
    """ValueError where outputs of a transaction that has spent its tokens before are not there: it had others."""
    absent = [id for id in ids if id not in issued]
    if absent:
        raise ValueError(f"transaction {transaction!r} has spent these tokens before, without outputs {some(absent)}")


def some(ids: Sequence[str]) -> str:
    """Ids for an error's text: the first ten."""
    more = f" and {len(ids) - 10} more" if len(ids) > 10 else ""  # noqa: PLR2004
    return ", ".join(map(repr, ids[:10])) + more
