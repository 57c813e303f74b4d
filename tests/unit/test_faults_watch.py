"""The checker of the tests with real faults detects violations."""

from __future__ import annotations

import time

import pytest

from faults.watch import Broken, Grant, Watch
from proxy import lines

SURE = time.monotonic() + 3600


@pytest.fixture
async def watch() -> Watch:
    return Watch()


def grant(watch: Watch, client: str, id_: int, fence: int, *, sure_until: float = SURE) -> Grant:
    made = Grant(client, id_, fence, ("k",), sure_until)
    watch.granted(made, connected_at=None, again=False)
    return made


async def test_a_correct_history_has_no_violations(watch: Watch) -> None:
    for number in (1, 2, 3):
        held = grant(watch, "a", number, 10 * number)
        value = watch.read(held, "k")
        assert value == number - 1
        assert watch.write(held, "k", value + 1)
        watch.left(held)
    watch.check()
    assert watch.store.wrong() == []
    assert watch.store.increments == 3


async def test_two_holders_of_one_key_are_a_violation(watch: Watch) -> None:
    grant(watch, "a", 1, 10)
    grant(watch, "b", 2, 11)
    with pytest.raises(Broken, match="b holds k as 2, and so does a as 1"):
        watch.check()


async def test_a_holder_that_may_have_lost_the_lock_does_not_conflict(watch: Watch) -> None:
    late = grant(watch, "a", 1, 10, sure_until=0)
    watch.read(late, "k")
    new = grant(watch, "b", 2, 11)
    watch.read(new, "k")
    assert not watch.write(late, "k", 1)
    assert watch.read(late, "k") is None
    assert watch.write(new, "k", 1)
    watch.check()
    assert watch.counts["refused"] == 2
    assert watch.store.wrong() == []


async def test_a_stale_fence_error_for_a_certain_holder_is_a_violation(watch: Watch) -> None:
    held = grant(watch, "a", 1, 10)
    watch.store.read("k", 11)
    watch.write(held, "k", 1)
    with pytest.raises(Broken, match=r"was refused .* though it surely holds 1"):
        watch.check()


@pytest.mark.parametrize(("fence", "match"), [(10, "was given to 1 and to 2"), (9, "fence 9 of k follows 10")])
async def test_fencing_tokens_must_grow(watch: Watch, fence: int, match: str) -> None:
    watch.left(grant(watch, "a", 1, 10))
    grant(watch, "b", 2, fence)
    with pytest.raises(Broken, match=match):
        watch.check()


async def test_a_reused_id_is_a_violation(watch: Watch) -> None:
    watch.known_as("a", "r1", 1)
    watch.known_as("a", "r1", 1)
    watch.check()
    watch.known_as("a", "r2", 1)
    with pytest.raises(Broken, match="id 1 is a's r2"):
        watch.check()


async def test_a_lost_or_doubled_increment_is_a_violation(watch: Watch) -> None:
    for value in (1, 1):
        watch.store.write("k", value, 5)
    assert watch.store.wrong() == ["k is 1, and 2 increments were acknowledged"]


@pytest.mark.parametrize(
    ("since", "command", "code", "bad"),
    [
        (5.0, "error", "unavailable", True),  # on a connection that it had before it was stopped
        (15.0, "error", "unavailable", False),
        (15.0, "welcome", None, True),
    ],
)
async def test_a_command_executed_by_a_former_leader_is_a_violation(
    watch: Watch, since: float, command: str, code: str | None, bad: bool
) -> None:
    address = ("127.0.0.1", 1)
    watch.heard(address, since, "pong", {})
    watch.silenced[address] = 10.0
    watch.heard(address, since, command, {"code": code})
    assert bool(watch.wrong) is bad


@pytest.mark.parametrize(
    ("command", "payload", "bad"),
    [
        ("locked", {"id": 1, "fence": 10}, False),
        ("locked", {"id": 1, "fence": 11}, True),
        ("locked", {"id": 2, "fence": 11}, True),
        ("queued", {"id": 1}, False),
        ("queued", {"id": 2}, True),
        ("released", {"id": 1}, True),  # the next leader says that it is held
        ("pong", {}, True),
    ],
)
async def test_a_late_reply_must_be_true(watch: Watch, command: str, payload: dict[str, int], bad: bool) -> None:
    watch.known_as("a", "r", 1)
    held = grant(watch, "a", 1, 10)
    watch.silenced["", 1] = 10.0
    watch.heard(("", 1), 5.0, command, payload)
    assert bool(watch.wrong) is bad
    watch.left(held)
    watch.wrong.clear()
    watch.heard(("", 1), 5.0, "released", {"id": 1})
    assert not watch.wrong


async def test_the_next_grant(watch: Watch) -> None:
    now = time.monotonic()
    any_, fresh = watch.grant_after(now, fresh=False), watch.grant_after(now, fresh=True)
    later = watch.grant_after(now + 3600, fresh=False)
    watch.granted(Grant("a", 1, 1, ("k",), 0), connected_at=now - 1, again=True)
    assert not any_.done()
    watch.granted(Grant("a", 2, 2, ("k",), 0), connected_at=now - 1, again=False)
    assert any_.done()
    assert not fresh.done()
    watch.granted(Grant("a", 3, 3, ("k",), 0), connected_at=now + 1, again=False)
    assert fresh.result() >= now
    assert not later.done()


def test_partial_lines_are_distinguished_from_lines() -> None:
    assert list(lines(b'{"command":"ping"}\n{"command":"po')) == [
        (b'{"command":"ping"}\n', "ping"),
        (b'{"command":"po', ""),
    ]
