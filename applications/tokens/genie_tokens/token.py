"""Tokens, and the wallets that contain them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

MAX_AMOUNT = 2**63 - 1
"""Greatest amount of one token, in its smallest unit."""

MAX_ID = 400
"""Greatest length of a token's id, in characters: it is part of a resource name."""


@dataclass(frozen=True, slots=True)
class Token:
    """An amount that can be spent once.

    `amount` counts the smallest unit: 1 to 2^63-1. `owner` is the key that can spend it, `account`
    groups the keys of several owners. `token_type` and `identifier` are the kind of the token
    ("Fiat", "GBP"). `metadata` is JSON-compatible data that Genie does not interpret.
    """

    id: str
    owner: str
    token_type: str
    identifier: str
    amount: int
    account: str | None = None
    issuer: str | None = None
    notary: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if type(self.id) is not str or not 0 < len(self.id) <= MAX_ID or not self.id.isprintable():
            raise ValueError(f"id must be 1 to {MAX_ID} printable characters, not {self.id!r}")
        # The lock of such a token would be a subtree, and no selection with this token would succeed.
        if self.id == "**" or self.id.endswith("/**"):
            raise ValueError(f"id must not be ** or end with /**, which stands for several locks, and is {self.id!r}")
        if type(self.amount) is not int or not 0 < self.amount <= MAX_AMOUNT:
            raise ValueError(f"amount must be an integer from 1 to {MAX_AMOUNT}, not {self.amount!r}")

    def plain(self) -> dict[str, Any]:
        """Return the token as JSON-compatible data, from which `Token(**data)` creates it again."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"metadata": dict(self.metadata)}


class Wallet(NamedTuple):
    """The tokens of one kind that belong to one owner's key, or to all keys of an account. Created
    by `make_wallet`.
    """

    token_type: str
    identifier: str
    owner: str | None
    account: str | None

    def has(self, token: Token) -> bool:
        """True if the wallet contains a token."""
        return (
            token.token_type == self.token_type
            and token.identifier == self.identifier
            and (token.owner == self.owner if self.account is None else token.account == self.account)
        )

    def __str__(self) -> str:
        holder = f"owner {self.owner!r}" if self.account is None else f"account {self.account!r}"
        return f"{self.token_type} {self.identifier} of {holder}"


def make_wallet(*, owner: str | None, account: str | None, token_type: str, identifier: str) -> Wallet:
    """Return the wallet of an owner's key or of an account. Raises ValueError unless exactly one of
    `owner` and `account` is given.
    """
    if (owner is None) == (account is None):
        raise ValueError("exactly one of owner= and account= must be given")
    return Wallet(token_type, identifier, owner, account)


def wallets_of(token: Token) -> tuple[Wallet, ...]:
    """Return the wallets that contain a token: the wallet of its owner, and the wallet of its
    account if it has one.
    """
    # Positional arguments are faster: the last two are `owner` and `account`.
    owner_wallet = Wallet(token.token_type, token.identifier, token.owner, None)
    if token.account is None:
        return (owner_wallet,)
    return owner_wallet, Wallet(token.token_type, token.identifier, None, token.account)


def check_amount(amount: int) -> int:
    """Return the requested amount. Raises ValueError if the amount is invalid."""
    if type(amount) is not int or not 0 < amount <= MAX_AMOUNT:
        raise ValueError(f"amount must be an integer from 1 to {MAX_AMOUNT}, not {amount!r}")
    return amount
