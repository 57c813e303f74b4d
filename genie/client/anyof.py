"""A request that leaves it to the server which of many resources to lock: what is free, until it is enough."""

from __future__ import annotations

from collections.abc import Sequence

from genie.client.calls import OnDisconnect, Request, check_on_disconnect, check_str, milliseconds, request_line
from genie.protocol.fields import MAX_WEIGHT
from genie.protocol.resources import MAX_CHOICES, check_name, from_people, parse


def any_request(
    ref: str,
    resources: Sequence[str],
    target: float,
    *,
    weights: Sequence[float] | None = None,
    transaction: str | None = None,
    transaction_timeout: float = 10.0,
    on_disconnect: OnDisconnect = "keep",
) -> Request:
    """A request for as many of the resources, as people name them and in this order, as reach the target.

    It never waits, so it has nothing in common with a `queue_timeout`. ValueError or TypeError says what is wrong with
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
    if transaction is not None:
        check_name(transaction, "the name of a transaction")
    bound = check_on_disconnect(on_disconnect)
    line = request_line(
        anyOf=names,
        weights=None if weights is None else list(weights),
        target=_check_weight(target, "target"),
        transactionTimeout=milliseconds(transaction_timeout, "transaction_timeout", least_ms=1),
        transactionName=transaction,
        onDisconnect=on_disconnect if bound else None,
        ref=ref,
    )
    request = Request(line, ref, names, 0.0, transaction_timeout, transaction, bound=bound)
    request.choices = choices
    return request


def _check_weight(weight: float, what: str) -> float:
    """Integers are told, and come back, as they are: no sum of them is rounded."""
    if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:
        raise ValueError(f"{what} must be a number above 0, at most 2^63-1, not {weight!r}")
    return weight
