"""Tokens to draw from: in random order, or by amount and in random order among equals.

Putting in, taking out and drawing the next one cost the same however many there are: a wallet may have a hundred thousand
tokens, and a selection needs five.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from random import random
from typing import Literal

from genie.tokens.token import Token

Prefer = Literal["small", "large"]


class Bag:
    """Tokens in no order. `places` is where each lies; bags that never share a token may share it."""

    __slots__ = ("_places", "_tokens")

    def __init__(self, places: dict[str, int] | None = None) -> None:
        self._places: dict[str, int] = {} if places is None else places
        self._tokens: list[Token] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Token]:
        return iter(self._tokens)

    def __contains__(self, id: str) -> bool:
        return id in self._places

    def add(self, token: Token) -> None:
        """Put in a token that is not there."""
        self._places[token.id] = len(self._tokens)
        self._tokens.append(token)

    def pop(self, id: str) -> Token:
        """Take out a token that is there."""
        place = self._places.pop(id)
        last = self._tokens.pop()
        if last.id == id:
            return last
        token, self._tokens[place] = self._tokens[place], last
        self._places[last.id] = place
        return token

    def draw(self) -> Iterator[Token]:
        """All tokens in an order that is new each time, drawn one by one (they stay in).

        It is the shuffle of Fisher and Yates, done as far as it is asked for. Nothing may be put in or taken out
        meanwhile.
        """
        tokens, places = self._tokens, self._places
        count = len(tokens)
        for place in range(count):
            other = place + int(random() * (count - place))  # noqa: S311 - no secret
            token = tokens[other]
            if other != place:
                tokens[other] = moved = tokens[place]
                tokens[place] = token
                places[moved.id], places[token.id] = other, place
            yield token


class ByAmount:
    """Tokens by amount, and in no order among equals."""

    __slots__ = ("_amounts", "_bags", "_places")

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._places: dict[str, int] = {}
        self._bags: dict[int, Bag] = {}
        for token in tokens:
            self._bag(token.amount).add(token)
        self._amounts = sorted(self._bags)

    def add(self, token: Token) -> None:
        """Put in a token that is not there."""
        if token.amount not in self._bags:
            insort(self._amounts, token.amount)
        self._bag(token.amount).add(token)

    def remove(self, token: Token) -> None:
        """Take out a token that is there."""
        bag = self._bags[token.amount]
        bag.pop(token.id)
        if not bag:
            del self._bags[token.amount]
            del self._amounts[bisect_left(self._amounts, token.amount)]

    def draw(self, prefer: Prefer) -> Iterator[Token]:
        """All tokens, those that are preferred first. Nothing may be put in or taken out meanwhile."""
        for amount in self._amounts if prefer == "small" else reversed(self._amounts):
            yield from self._bags[amount].draw()

    def _bag(self, amount: int) -> Bag:
        bag = self._bags.get(amount)
        if bag is None:
            bag = self._bags[amount] = Bag(self._places)
        return bag
