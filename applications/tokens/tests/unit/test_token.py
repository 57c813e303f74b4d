from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from genie_tokens.token import MAX_AMOUNT, MAX_ID, Token, Wallet, check_amount, make_wallet, wallets_of


def token(**fields: Any) -> Token:
    return Token(**({"id": "t", "owner": "alice", "token_type": "Fiat", "identifier": "GBP", "amount": 1} | fields))


@pytest.mark.parametrize("id", ["", "x" * (MAX_ID + 1), "a\nb", "a\0", "\ud800", 7, None])
def test_an_id_must_be_printable_and_not_too_long(id: Any) -> None:
    with pytest.raises(ValueError, match="id must be 1 to 400 printable characters"):
        token(id=id)


@pytest.mark.parametrize("id", ["**", "tx/**"])
def test_an_id_must_not_name_a_subtree(id: str) -> None:
    with pytest.raises(ValueError, match=r"id must not be \*\* or end with /\*\*"):
        token(id=id)


@pytest.mark.parametrize("id", ["x", "x" * MAX_ID, "tx/7:0", "ü €", "\U0001f600", "*", "a**", "tx/*"])
def test_any_printable_id_is_valid(id: str) -> None:
    assert token(id=id).id == id


@pytest.mark.parametrize("amount", [0, -1, MAX_AMOUNT + 1, 1.0, True, "5", None])
def test_an_amount_must_be_a_positive_64_bit_integer(amount: Any) -> None:
    with pytest.raises(ValueError, match=r"amount must be an integer from 1 to 9223372036854775807"):
        token(amount=amount)
    with pytest.raises(ValueError, match=r"amount must be an integer from 1 to 9223372036854775807"):
        check_amount(amount)


@pytest.mark.parametrize("amount", [1, MAX_AMOUNT])
def test_the_smallest_and_the_largest_amount_are_valid(amount: int) -> None:
    assert token(amount=amount).amount == check_amount(amount) == amount


def test_a_token_is_a_value() -> None:
    one, same = token(metadata={"note": ["a"]}), token(metadata={"note": ["a"]})
    assert one == same
    assert hash(one) == hash(same), "what can't be hashed in its metadata is left out"
    assert one != token(metadata={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.amount = 2  # type: ignore[misc]


def test_a_wallet_has_either_an_owner_or_an_account() -> None:
    assert make_wallet(owner="a", account=None, token_type="T", identifier="I") == Wallet("T", "I", "a", None)
    assert make_wallet(owner=None, account="a", token_type="T", identifier="I") == Wallet("T", "I", None, "a")
    for owner, account in ((None, None), ("a", "b")):
        with pytest.raises(ValueError, match="exactly one of owner= and account="):
            make_wallet(owner=owner, account=account, token_type="T", identifier="I")


def test_a_wallet_contains_the_tokens_of_its_owner_or_account() -> None:
    own = make_wallet(owner="alice", account=None, token_type="Fiat", identifier="GBP")
    group = make_wallet(owner=None, account="acme", token_type="Fiat", identifier="GBP")
    assert own.has(token())
    assert own.has(token(account="acme"))
    assert group.has(token(account="acme", owner="bob"))
    assert not group.has(token())
    assert not group.has(token(account="other"))
    for fields in ({"owner": "bob"}, {"token_type": "Bond"}, {"identifier": "EUR"}):
        assert not own.has(token(**fields))


def test_wallets_of_a_token_contain_it() -> None:
    assert wallets_of(token()) == (Wallet("Fiat", "GBP", "alice", None),)
    both = wallets_of(token(account="acme"))
    assert both == (Wallet("Fiat", "GBP", "alice", None), Wallet("Fiat", "GBP", None, "acme"))
    assert all(each.has(token(account="acme")) for each in both)


def test_a_wallet_is_described_by_its_kind_and_holder() -> None:
    assert [str(each) for each in wallets_of(token(account="acme"))] == [
        "Fiat GBP of owner 'alice'",
        "Fiat GBP of account 'acme'",
    ]
