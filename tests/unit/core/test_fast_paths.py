"""The fast paths of the lock manager have the same effects as steps."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from genie.core import Event, Expire, Granted, LockManager, Release, Released, Request
from genie.core.model import SUCCESS, Origin, details_of
from support.runs.searches import FACTOR, seeds


class Client:
    """A session, as far as the lock manager is concerned."""

    key: str | None = None
    timeout_ms = 0.0
    note: str | None = None


CLIENTS: list[Origin] = [Client(), Client()]


NAMES = ["a", "b", "c", "d", "e", "f", "x/1", "x/2"]


def random_command(random: Random, manager: LockManager) -> Callable[[], Request | Release]:
    """Return a function that makes equal commands. Most releases are of held requests, so that most names are unlocked."""
    held, next_id = [*manager.table.held], manager.next_id
    if next_id > 1 and random.random() < 0.5:
        id_ = random.choice(held) if held and random.random() < 0.8 else random.randint(max(1, next_id - 6), next_id)
        return lambda: Release(id_)
    kind = random.random()
    exclusive, shared, units = tuple(random.sample(NAMES, random.choice([1, 1, 2]))), (), {}
    if kind < 0.2:
        exclusive, units = (), {"pool": (random.randint(1, 2), 3)}
    elif kind < 0.3:
        exclusive, shared = exclusive[1:], ("shared",)
    elif kind < 0.35:
        exclusive = ("x/**",)
    transaction, client = random.choice([None, None, "t", "u"]), random.choice(CLIENTS)
    timeout_ms = random.choice([2.0, 5.5, 20.0])

    def make_request() -> Request:
        request = Request(shared, exclusive, 20.0, timeout_ms, transaction=transaction, origin=client)
        request.details = details_of(shared, exclusive, units)
        return request

    return make_request


def execute_with_fast_paths(
    manager: LockManager, command: Request | Release, origin: Origin, now: float
) -> tuple[list[Event], bool]:
    """Execute a command as the server does. Return the events of the equivalent step, and whether a fast path executed it."""
    if isinstance(command, Request):
        if manager.grant_if_uncontended(command, now):
            return [Granted(command)], True
    elif (request := manager.release_if_uncontended(command.id, origin)) is not None:
        return [Released(request, SUCCESS)], True
    return manager.step(command, now), False


def describe_event(event: Event) -> tuple[object, ...]:
    request = getattr(event, "request", None)
    return (type(event), *describe_request(request)) if isinstance(request, Request) else (type(event), repr(event))


def describe_request(request: Request) -> tuple[object, ...]:
    unset = object()
    names = ("id", "owner", "state", "fence", "since", "since_unix_ms", "deadline", "origin", "transaction")
    return tuple(value for name in names if (value := getattr(request, name, unset)) is not unset)


def describe(manager: LockManager) -> tuple[object, ...]:
    """Return the complete state of a lock manager, with its order."""
    table = manager.table
    return (
        [describe_request(request) for requests in (table.held, table.waiting) for request in requests.values()],
        [(name, request.id) for name, request in table.uncontended.items()],
        [(name, list(resource.holders), resource.exclusive_count) for name, resource in table.resources.items()],
        [
            (name, list(transaction.held), list(transaction.waiting), transaction.grants)
            for name, transaction in table.transactions.items()
        ],
        (table.grants, table.queue_entries, manager.next_id, manager.next_fence, manager.deadlines.next),
        [manager.outcome(id_) for id_ in range(1, manager.next_id)],
    )


def compare_with_steps(seed: int) -> dict[type, int]:
    """Execute random commands with and without the fast paths. Return how many of each type a fast path has executed."""
    random = Random(seed)  # noqa: S311 - reproducible
    fast, plain = LockManager(unix_offset_ms=1_000.0), LockManager(unix_offset_ms=1_000.0)
    now = 0.0
    fast_counts: dict[type, int] = {Request: 0, Release: 0}
    for _ in range(300):
        now += random.choice([0, 0, 1, 3])
        expired, expected = fast.step(Expire(), now), plain.step(Expire(), now)
        assert list(map(describe_event, expired)) == list(map(describe_event, expected))
        make_command = random_command(random, plain)
        command = make_command()
        events, is_fast = execute_with_fast_paths(fast, command, CLIENTS[0], now)
        expected = plain.step(make_command(), now)
        assert list(map(describe_event, events)) == list(map(describe_event, expected))
        assert describe(fast) == describe(plain)
        fast_counts[type(command)] += is_fast
    return fast_counts


@pytest.mark.soak
@seeds(5, FACTOR // 5)
def test_fast_paths_have_the_effects_of_steps(seed: int) -> None:
    compare_with_steps(seed)


def test_random_commands_take_the_fast_paths() -> None:
    """One fixed seed, because the locks of a few seeds are held nearly all the time."""
    assert min(compare_with_steps(0).values()) >= 10


def test_the_fast_paths_leave_other_commands_to_a_step() -> None:
    manager, own, other = LockManager(), CLIENTS[0], CLIENTS[1]
    held = Request(exclusive=("a",), origin=own)
    assert manager.grant_if_uncontended(held, 0)
    assert not manager.grant_if_uncontended(Request(exclusive=("b", "a")), 0), "a lock is held"
    assert not manager.grant_if_uncontended(Request(shared=("b",)), 0), "shared"
    assert manager.release_if_uncontended(held.id, other) is None, "another session's request"
    assert manager.release_if_uncontended(held.id + 1, own) is None, "no such request"
    before = describe(manager)
    manager.step(waiting := Request(exclusive=("a",), origin=own), 0)
    assert manager.release_if_uncontended(held.id, own) is None, "another request waits for the lock"
    assert manager.release_if_uncontended(waiting.id, own) is None, "not held"
    manager.step(Release(waiting.id), 0)
    assert describe(manager)[:3] == (before[0], [], [("a", [held.id], 1)])
