"""The lock order that the servers of a test run have observed, as an assertion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from genie.core.lock_order.analysis import LockOrder
from genie.core.lock_order.classes import Rule, parse_rules
from genie.core.lock_order.inversions import Inversion, describe_edge

_rules: tuple[Rule, ...] = ()
_observed: dict[str, LockOrder] = {}
"""The lock order by namespace, over all servers that this process has run for tests."""
_reported_counts: dict[str, int] = {}
"""By namespace, the number of inversions that `assert_lock_order` has reported."""


def set_lock_order_rules(rules: str) -> None:
    """Set the rules for the classes of names, as in `genie serve --lock-order-rules`.

    Discards what was observed before.

    Raises ValueError if the rules are invalid.
    """
    global _rules  # noqa: PLW0603 - one test run has one set of rules
    _rules = parse_rules(rules)
    for lock_order in _observed.values():
        LockOrder.__init__(lock_order, _rules)  # resets the object, because running servers have references to it
    _reported_counts.clear()


def observed(namespaces: Iterable[str]) -> dict[str, LockOrder]:
    """Return the lock order of each namespace that earlier servers of this process have observed.

    A new server adds to it.
    """
    return {name: _observed.setdefault(name, LockOrder(_rules)) for name in namespaces}


def assert_lock_order() -> None:
    """Raise AssertionError if transactions have locked names in orders that can deadlock. The message names them.

    Covers all servers that this process has run with `genie.testing.run`, `genie.testing.server` or the fixture
    `genie_server`. The worlds of `genie.testing.explore` are not covered, because they may run in other processes.

    No test needs to end in a deadlock: one test may lock in one order, and another test in the other order. Each
    inversion is reported once. So if this is called after each test, it fails for the test that completes an inversion.
    It also fails for a later test whose transactions do the same, if their names have another stem (`pay-*` for
    `pay-17`).
    """
    lines: list[str] = []
    for namespace, lock_order in _observed.items():
        found = lock_order.inversions.found
        for inversion in found[_reported_counts.get(namespace, 0) :]:
            lines += _describe_inversion(inversion)
        _reported_counts[namespace] = len(found)
    if lines:
        raise AssertionError("\n".join(("locks are taken in orders that can deadlock", *lines)))


def _describe_inversion(inversion: Inversion) -> Iterator[str]:
    """Yield the lines of an error message: what is wrong, and an example of each order."""
    yield f"- {inversion.description}:"
    for edge in inversion.edges:
        example = edge.example
        held, asked = f"{edge.held_mode}:{example.held}", f"{edge.asked_mode}:{example.asked}"
        note = "" if example.context.note is None else f" ({example.context.note})"
        yield f"    {describe_edge(example.transaction, held, asked)}{note}"
