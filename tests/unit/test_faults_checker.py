"""The checker of the tests with real faults detects violations."""

from __future__ import annotations

import time

import pytest

from faults.checker import Checker, Grant, Violation
from support.network.proxy import lines

FAR_FUTURE = time.monotonic() + 3600


@pytest.fixture
async def checker() -> Checker:
    return Checker()


def grant(checker: Checker, client: str, id_: int, fence: int, *, certain_until: float = FAR_FUTURE) -> Grant:
    new_grant = Grant(client, id_, fence, ("k",), certain_until)
    checker.granted(new_grant, connected_at=None, is_repetition=False)
    return new_grant


async def test_a_correct_history_has_no_violations(checker: Checker) -> None:
    for number in (1, 2, 3):
        held = grant(checker, "a", number, 10 * number)
        value = checker.read(held, "k")
        assert value == number - 1
        assert checker.write(held, "k", value + 1)
        checker.lost(held)
    checker.check()
    assert checker.store.mismatches() == []
    assert checker.store.increments == 3


async def test_two_holders_of_one_key_are_a_violation(checker: Checker) -> None:
    grant(checker, "a", 1, 10)
    grant(checker, "b", 2, 11)
    with pytest.raises(Violation, match="b holds k as 2, and so does a as 1"):
        checker.check()


async def test_a_holder_that_may_have_lost_the_lock_does_not_conflict(checker: Checker) -> None:
    late = grant(checker, "a", 1, 10, certain_until=0)
    checker.read(late, "k")
    new = grant(checker, "b", 2, 11)
    checker.read(new, "k")
    assert not checker.write(late, "k", 1)
    assert checker.read(late, "k") is None
    assert checker.write(new, "k", 1)
    checker.check()
    assert checker.counts["rejected"] == 2
    assert checker.store.mismatches() == []


async def test_a_stale_fence_error_for_a_certain_holder_is_a_violation(checker: Checker) -> None:
    held = grant(checker, "a", 1, 10)
    checker.store.read("k", 11)
    checker.write(held, "k", 1)
    with pytest.raises(Violation, match=r"was rejected .* though it certainly holds 1"):
        checker.check()


@pytest.mark.parametrize(("fence", "match"), [(10, "was assigned to 1 and to 2"), (9, "fence 9 of k follows 10")])
async def test_fencing_tokens_must_grow(checker: Checker, fence: int, match: str) -> None:
    checker.lost(grant(checker, "a", 1, 10))
    grant(checker, "b", 2, fence)
    with pytest.raises(Violation, match=match):
        checker.check()


async def test_a_reused_id_is_a_violation(checker: Checker) -> None:
    checker.record_id("a", "r1", 1)
    checker.record_id("a", "r1", 1)
    checker.check()
    checker.record_id("a", "r2", 1)
    with pytest.raises(Violation, match="id 1 is a's r2"):
        checker.check()


async def test_a_lost_or_doubled_increment_is_a_violation(checker: Checker) -> None:
    for value in (1, 1):
        checker.store.write("k", value, 5)
    assert checker.store.mismatches() == ["k is 1, and 2 increments were acknowledged"]


@pytest.mark.parametrize(
    ("since", "command", "code", "is_violation"),
    [
        (5.0, "error", "unavailable", True),  # on a connection that it had before it was stopped
        (15.0, "error", "unavailable", False),
        (15.0, "welcome", None, True),
    ],
)
async def test_a_command_executed_by_a_former_leader_is_a_violation(
    checker: Checker, since: float, command: str, code: str | None, is_violation: bool
) -> None:
    address = ("127.0.0.1", 1)
    checker.message_received(address, since, "pong", {})
    checker.stopped_leaders[address] = 10.0
    checker.message_received(address, since, command, {"code": code})
    assert bool(checker.violations) is is_violation


@pytest.mark.parametrize(
    ("command", "payload", "is_violation"),
    [
        ("locked", {"id": 1, "fence": 10}, False),
        ("locked", {"id": 1, "fence": 11}, True),
        ("locked", {"id": 2, "fence": 11}, True),
        ("queued", {"id": 1}, False),
        ("queued", {"id": 2}, True),
        ("released", {"id": 1}, True),  # according to the next leader it is held
        ("pong", {}, True),
    ],
)
async def test_a_late_reply_must_be_true(
    checker: Checker, command: str, payload: dict[str, int], is_violation: bool
) -> None:
    checker.record_id("a", "r", 1)
    held = grant(checker, "a", 1, 10)
    checker.stopped_leaders["", 1] = 10.0
    checker.message_received(("", 1), 5.0, command, payload)
    assert bool(checker.violations) is is_violation
    checker.lost(held)
    checker.violations.clear()
    checker.message_received(("", 1), 5.0, "released", {"id": 1})
    assert not checker.violations


async def test_the_time_of_the_next_grant_is_reported(checker: Checker) -> None:
    now = time.monotonic()
    any_, fresh = checker.grant_after(now, fresh=False), checker.grant_after(now, fresh=True)
    later = checker.grant_after(now + 3600, fresh=False)
    checker.granted(Grant("a", 1, 1, ("k",), 0), connected_at=now - 1, is_repetition=True)
    assert not any_.done()
    checker.granted(Grant("a", 2, 2, ("k",), 0), connected_at=now - 1, is_repetition=False)
    assert any_.done()
    assert not fresh.done()
    checker.granted(Grant("a", 3, 3, ("k",), 0), connected_at=now + 1, is_repetition=False)
    assert fresh.result() >= now
    assert not later.done()


def test_partial_lines_are_distinguished_from_complete_ones() -> None:
    assert list(lines(b'{"command":"ping"}\n{"command":"po')) == [
        (b'{"command":"ping"}\n', "ping"),
        (b'{"command":"po', ""),
    ]
