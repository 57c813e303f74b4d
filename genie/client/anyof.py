"""A request that leaves it to the server which of many resources to lock: what is free, until it is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from genie.client.calls import (
    OnDisconnect,
    Request,
    check_note,
    check_on_disconnect,
    check_str,
    milliseconds,
    request_line,
)
from genie.protocol.fields import MAX_DIGITS, MAX_WEIGHT
from genie.protocol.resources import MAX_CHOICES, check_name, from_people, parse

MAX_AMOUNT: Final = 10**MAX_DIGITS
"""Weights and targets are below this. Those above `MAX_WEIGHT` are sent as decimal strings, and so are the others then."""


def any_request(
    ref: str,
    resources: Sequence[str],
    target: int,
    *,
    weights: Sequence[int] | None = None,
    transaction: str | None = None,
    transaction_timeout: float = 10.0,
    on_disconnect: OnDisconnect = "keep",
    note: str | None = None,
) -> Request:
    """A request for as many of the resources, as people name them and in this order, as reach the target.

    Amounts are integers and are added exactly, however large. It never waits. ValueError or TypeError says what is wrong with
    an argument, RequestRejected that the line would be too long.
    """
    if isinstance(resources, str) or not isinstance(resources, Sequence):
        raise TypeError(f"resources are a list of strings, not {resources!r}; what each is worth are the weights")
    if not 0 < len(resources) <= MAX_CHOICES:
        raise ValueError(f"1 to {MAX_CHOICES} resources can be chosen from, not {len(resources)}")
    names = tuple([from_people(check_str(resource)) for resource in resources])
    choices = {parse(name)[1]: name for name in names}
    if len(choices) < len(names):
        raise ValueError("each resource can be named once among those that are chosen from")
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"weights must be as many as the resources, {len(names)}, not {len(weights)}")
    for weight in weights or ():
        _check_weight(weight, "a weight")
    _check_weight(target, "target")
    as_text = max(target, *(weights or ())) > MAX_WEIGHT if weights else target > MAX_WEIGHT
    if transaction is not None:
        check_name(transaction, "the name of a transaction")
    bound = check_on_disconnect(on_disconnect)
    check_note(note)
    line = request_line(
        anyOf=names,
        weights=None if weights is None else [str(weight) if as_text else weight for weight in weights],
        target=str(target) if as_text else target,
        transactionTimeout=milliseconds(transaction_timeout, "transaction_timeout", least_ms=1),
        transactionName=transaction,
        onDisconnect=on_disconnect if bound else None,
        note=note,
        ref=ref,
    )
    request = Request(line, ref, names, 0.0, transaction_timeout, transaction, bound=bound)
    request.choices = choices
    return request


def _check_weight(weight: int, what: str) -> None:
    if type(weight) is not int or not 0 < weight < MAX_AMOUNT:
        raise ValueError(f"{what} must be an integer from 1, of at most {MAX_DIGITS} digits, not {weight!r}")
