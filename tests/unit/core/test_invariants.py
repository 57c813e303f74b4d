"""The invariants of a recovered state: compared with the slow checks of the simulator, which compare all pairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.core import HELD, LockManager, Request
from genie.core.invariants import find_violations
from genie.core.model import WAITING
from simulator import invariants as slow

NAMES = ("a", "b", "c")


def request_of(
    id_: int, *, held: bool, exclusive: tuple[str, ...], shared: tuple[str, ...], transaction: str | None
) -> Request:
    request = Request(shared, exclusive, transaction=transaction)
    request.id, request.owner = id_, transaction or id_
    request.since = request.since_unix_ms = 0.0
    request.deadline = 1
    if held:
        request.state, request.fence = HELD, id_
    else:
        request.state, request.queue_entry = WAITING, (0.0, id_, request)
    return request


@st.composite
def stored(draw: st.DrawFn) -> list[Request]:
    requests = []
    for id_ in range(1, draw(st.integers(1, 7)) + 1):
        modes = draw(st.dictionaries(st.sampled_from(NAMES), st.booleans(), min_size=1))
        requests.append(
            request_of(
                id_,
                held=draw(st.booleans()),
                exclusive=tuple(name for name, exclusive in modes.items() if exclusive),
                shared=tuple(name for name, exclusive in modes.items() if not exclusive),
                transaction=draw(st.sampled_from(["t", "u", "v", None])),
            )
        )
    return requests


def violates(check: object, manager: LockManager) -> bool:
    try:
        check(manager)  # type: ignore[operator]
    except slow.Violation:
        return True
    return False


@given(stored())
def test_conflicts_and_cycles_are_those_of_the_slow_checks(requests: list[Request]) -> None:
    manager = LockManager()
    for request in requests:
        manager.adopt(request)
    violations = list(find_violations(requests))
    conflict = violates(slow._check_no_conflicting_holders, manager)
    assert any("both hold" in violation for violation in violations) == conflict
    if not conflict:
        cycle = violates(slow._check_no_cycle, manager)
        assert any("in a cycle" in violation for violation in violations) == cycle
        assert bool(violations) == cycle


def test_a_waiting_request_needs_no_blocker() -> None:
    """Its blocker may have been a waiting request without a session, which is not stored."""
    waiting = request_of(1, held=False, exclusive=("a",), shared=(), transaction=None)
    assert not list(find_violations([waiting]))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((1, True, "a"), (2, True, "b"), "both have the fencing token 1"),
        ((1, False, "a"), (2, False, "a"), "have the same position in the queue of 'a'"),
    ],
)
def test_what_must_be_unique(first: tuple[int, bool, str], second: tuple[int, bool, str], message: str) -> None:
    requests = [
        request_of(id_, held=held, exclusive=(name,), shared=(), transaction=None)
        for id_, held, name in (first, second)
    ]
    assert not list(find_violations(requests))
    requests[1].fence = requests[0].fence
    if requests[1].queue_entry is not None:
        requests[1].move("a", (0.0, 1, requests[1]))
    (violation,) = find_violations(requests)
    assert violation.endswith(message)
