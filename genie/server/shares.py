"""Amounts by named principal, such as bytes or queue entries: the part of a total that one principal uses."""

from __future__ import annotations

Shares = dict[str, int]
"""The amount of each named principal with an amount above 0. Clients without a token have no name, and are not included."""


def add(shares: Shares, principal: str | None, amount: int) -> None:
    """Add an amount to the share of a principal. Does nothing for clients without a name."""
    if principal is not None:
        shares[principal] = shares.get(principal, 0) + amount


def subtract(shares: Shares, principal: str | None, amount: int) -> None:
    """Subtract an amount that was added before. A share of 0 is removed, so that the dict does not grow."""
    if principal is not None:
        left = shares.get(principal, 0) - amount
        if left > 0:
            shares[principal] = left
        else:
            shares.pop(principal, None)
