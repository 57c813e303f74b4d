"""The lock order that the servers of a test run have observed, as an assertion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from genie.core.lock_order.analysis import LockOrder
from genie.core.lock_order.classes import Rule, parse_rules
from genie.core.lock_order.inversions import Inversion, describe_edge

_rules: tuple[Rule, ...] = ()
_observed: dict[str, LockOrder] = {}
"""The lock order by namespace, over all servers that this process has run for tests."""
_reported: dict[str, int] = {}
"""By namespace, the number of inversions that `assert_lock_order` has reported."""


def set_lock_order_rules(rules: str) -> None:
    """Set the rules for the classes of names, as in `genie serve --lock-order-rules`. Forgets what was observed before.

    Raises ValueError if the rules are invalid.
    """
    global _rules  # noqa: PLW0603 - one test run has one set of rules
    _rules = parse_rules(rules)
    for lock_order in _observed.values():
        LockOrder.__init__(lock_order, _rules)  # in place, because servers that are running keep it
    _reported.clear()


def observed(namespaces: Iterable[str]) -> dict[str, LockOrder]:
    """Return what the earlier servers of this process have observed in each namespace, to which a new server adds."""
    return {name: _observed.setdefault(name, LockOrder(_rules)) for name in namespaces}


def assert_lock_order() -> None:
    """Raise AssertionError if transactions have locked names in orders that can deadlock. The message names them.

    Covers all servers that this process has run until now with `genie.testing.run`, `genie.testing.server` or the fixture
    `genie_server`. No test need have run into the deadlock: each direction may come from another test. Each inversion is
    reported once: called after each test, the assertion fails for the test that completed the inversion. It also fails for a
    later test whose transactions do the same, if their names have another stem (`pay-*` for `pay-17`). The worlds of
    `genie.testing.explore` are not covered: they may run in other processes.
    """
    lines: list[str] = []
    for namespace, lock_order in _observed.items():
        for inversion in lock_order.inversions.found[_reported.get(namespace, 0) :]:
            lines += _describe_inversion(inversion)
        _reported[namespace] = len(lock_order.inversions.found)
    if lines:
        raise AssertionError("\n".join(("locks are taken in orders that can deadlock", *lines)))


def _describe_inversion(inversion: Inversion) -> Iterator[str]:
    yield f"- {inversion.description}:"
    for edge in inversion.edges:
        example = edge.example
        held, asked = f"{edge.held_mode}:{example.held}", f"{edge.asked_mode}:{example.asked}"
        note = "" if example.context.note is None else f" ({example.context.note})"
        yield f"    {describe_edge(example.transaction, held, asked)}{note}"
