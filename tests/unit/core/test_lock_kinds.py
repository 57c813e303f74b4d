"""The lock manager decides about all kinds of locks as the theory does: the same grants, deadlocks and queues at every step.

Shared, exclusive and counted locks, subtrees at three depths, priorities, and transactions with several requests are mixed at random.
"""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random

import pytest

from genie.core import (
    Command,
    Continue,
    Deadlocked,
    Event,
    Extend,
    Granted,
    GraphFull,
    LockManager,
    Moved,
    QueueFull,
    Recover,
    Release,
    Request,
    subtrees,
)
from genie.core.invariants import find_violations
from genie.core.model import State, details_of
from genie.lock_modes import S, U, X
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.store import Batch, StateMachine, StoredOrigin
from simulator.invariants import check
from support.runs.searches import FACTOR, seeds
from unit.core.lock_theory import Entry, Lock, ReferenceManager, depends, leaves_room, meeting, reduce
from unit.core.test_lock_theory import MAX_OWNERS, random_request

ORIGIN = StoredOrigin("session", 0)

SEEDS = 40
LONG_SEEDS = 14
STEPS = 120

searches = seeds(SEEDS, FACTOR // 2)
"""In `make test` each search has about 5,000 random steps, in `make soak-tests` more than 100,000."""
long_searches = seeds(LONG_SEEDS, FACTOR)
"""Seeds of the searches that have about 400 random steps each."""


def to_request(entry: Entry) -> Request:
    shared = tuple(lock.name for lock in entry.locks if lock.mode == "shared")
    exclusive = tuple(lock.name for lock in entry.locks if lock.mode == "exclusive")
    units = {lock.name: (lock.units, lock.of) for lock in entry.locks if lock.mode == "units"}
    request = Request(
        shared=shared,
        exclusive=exclusive,
        transaction=entry.owner if isinstance(entry.owner, str) else None,
        priority=float(entry.priority),
        queue_timeout_ms=1e12,
        transaction_timeout_ms=1e12,
    )
    request.details = details_of(shared, exclusive, units)
    return request


def theory_of(manager: LockManager) -> ReferenceManager:
    """Return the theory in the state of a lock manager."""
    theory = ReferenceManager()
    for request in sorted([*manager.table.held.values(), *manager.table.waiting.values()], key=lambda each: each.id):
        theory.requests.append(to_entry(request))
    return theory


def to_entry(request: Request) -> Entry:
    modes = {S: "shared", X: "exclusive", U: "units"}
    locks = [Lock(name, modes[mode], *request.units.get(name, ())) for name, mode in request.modes()]
    moved = {name: entry[:2] for name, entry in (request.moved or {}).items()}
    held = request.state is State.HELD
    return Entry(request.id, request.owner, tuple(locks), request.priority, held, moved)


def may_exclude(one: Entry, other: Entry, resource: str) -> bool:
    """Return whether two requests that meet in the queue of a resource may have to wait for each other."""
    return any(
        meeting(lock.name, theirs.name) == resource and depends(lock, theirs)
        for lock in one.locks
        for theirs in other.locks
    )


class Checked:
    """A lock manager, each step of which is compared with what the theory does in the same state."""

    def __init__(self) -> None:
        self.manager = LockManager()
        self.deadlocks = 0

    def request(self, entry: Entry) -> None:
        theory, rearrangements = theory_of(self.manager), self.manager.rearrangements
        was_moved = any(other.moved for other in theory.requests)  # then the place of a new request differs
        theory.request(entry)
        request = to_request(entry)
        request.origin = ORIGIN
        events: list[Event]
        is_granted = self._is_fast(entry.id) and self.manager.grant_if_uncontended(request, 0)
        events = [Granted(request)] if is_granted else self.manager.step(request, 0)
        assert not isinstance(events[0], GraphFull)
        deadlocked = any(isinstance(event, Deadlocked) for event in events)
        assert deadlocked == (theory.deadlocks > 0), (entry, events)
        self.deadlocks += deadlocked
        rearranged = self.manager.rearrangements > rearrangements
        assert theory.rearrangements or not rearranged or was_moved
        took_another_place = any(isinstance(event, Moved) for event in events)
        self.check(None if rearranged or theory.rearrangements or took_another_place else theory)

    def end(self, id: int) -> None:
        theory = theory_of(self.manager)
        theory.end(next(entry for entry in theory.requests if entry.id == id))
        if not (self._is_fast(id) and self.manager.release_if_uncontended(id, ORIGIN)):
            self.manager.step(Release(id), 0)
        self.check(theory)

    def _is_fast(self, id: int) -> bool:
        """True if the fast path is tried, as the server does, or only the step that it replaces."""
        return id % 3 > 0

    def check(self, expected: ReferenceManager | None = None) -> None:
        while self.manager.pending_grants:
            self.manager.step(Continue(), 0)
        check(self.manager)
        theory, table = theory_of(self.manager), self.manager.table
        if expected is not None:
            assert [(entry.id, entry.held) for entry in theory.requests] == [
                (entry.id, entry.held) for entry in expected.requests
            ]
        assert not any(leaves_room(entry, theory.held(), theory.waiting()) for entry in theory.waiting())
        assert not reduce(theory.requests, in_queue_order=True)[1]
        named = {lock.name for entry in theory.requests for lock in entry.locks}
        assert set(table.subtrees) == {name for name in named if name.endswith("**")}
        for name in named:
            resource = table.resources.get(name)
            queue = [] if resource is None or resource.wait_queue is None else resource.wait_queue.entries()
            assert [request.id for *_, request in queue] == [entry.id for entry in theory.queue(name)]


def run(seed: int, steps: int) -> Checked:
    random, checked = Random(seed), Checked()  # noqa: S311
    for _ in range(steps):
        table = checked.manager.table
        requests = [*table.held.values(), *table.waiting.values()]
        owners = {request.owner for request in requests}
        if random.random() < 0.6 and len(owners) < MAX_OWNERS:
            checked.request(random_request(random, checked.manager.next_id))
        elif requests:
            checked.end(random.choice(requests).id)
    return checked


@pytest.mark.soak
@searches
def test_the_lock_manager_decides_as_the_theory(seed: int) -> None:
    run(seed, STEPS)


@pytest.mark.parametrize(("earlier", "later"), [((1, 4), (2, 2)), ((1, 2), (2, 4))])
def test_a_later_request_must_fit_into_its_own_limit_and_into_that_of_an_earlier_one(
    earlier: tuple[int, int], later: tuple[int, int]
) -> None:
    """The earlier request waits for another resource, and units of the pool are free."""
    checked = Checked()
    checked.request(Entry(1, 1, (Lock("c", "exclusive"),)))
    checked.request(Entry(2, 2, (Lock("c", "exclusive"), Lock("pool", "units", *earlier))))
    checked.request(Entry(3, 3, (Lock("pool", "units", *later),)))
    assert list(checked.manager.table.held) == [1]
    checked.end(2)
    assert list(checked.manager.table.held) == [1, 3]


# -- The state elsewhere: stored, loaded in any order, and followed -----------------------


class Leader:
    """A lock manager with random requests, whose state can be dumped and loaded at any step."""

    def __init__(self, random: Random, manager: LockManager) -> None:
        self.random = random
        self.manager = manager

    def next_command(self) -> Command:
        table = self.manager.table
        requests = [*table.held.values(), *table.waiting.values()]
        if requests and (self.random.random() < 0.4 or len({request.owner for request in requests}) >= MAX_OWNERS):
            request = self.random.choice(requests)
            return Extend(request.id, 2e12) if self.random.random() < 0.2 else Release(request.id)
        request = to_request(random_request(self.random, self.manager.next_id))
        request.origin = StoredOrigin("session", 0)
        return request

    def step(self) -> None:
        execute(self.manager, self.next_command())

    def step_alone(self) -> None:
        """Execute a command, and leave grants that are pending."""
        self.manager.step(self.next_command(), 0.0)


def execute(manager: LockManager, command: Command) -> list[tuple[str, int]]:
    """Return the sorted types and ids of the events of a command, and of the grants that it leaves for later.

    Their order, and the locks that describe a deadlock or the blockers, depend on the order in which requests were loaded.
    """
    events = manager.step(command, 0.0)
    while manager.pending_grants:
        events += manager.step(Continue(), 0.0)
    return sorted((type(event).__name__, event.request.id) for event in events if hasattr(event, "request"))


def dump(manager: LockManager) -> dict[int, bytes]:
    """Return the records of all requests."""
    return {request.id: encode(request) for request in [*manager.table.held.values(), *manager.table.waiting.values()]}


def decoded(records: dict[int, bytes]) -> dict[int, object]:
    """Return records without the differences between 0, 0.0 and -0.0."""
    return {id_: json.loads(record) for id_, record in records.items()}


def queues(manager: LockManager) -> dict[str, list[tuple[float, int, int, int]]]:
    """Return the wait queue of each resource: priority, ticket, id and mode."""
    return {
        name: [
            (priority, ticket, request.id, request.queue_mode(name))
            for priority, ticket, request in resource.wait_queue.entries()
        ]
        for name, resource in manager.table.resources.items()
        if resource.wait_queue is not None
    }


@pytest.mark.soak
@long_searches
def test_a_state_that_is_loaded_in_any_order_decides_as_the_original(seed: int) -> None:
    """The requests are decoded, or are in the memory of a former leader when Redis has lost its commits."""
    random = Random(seed)  # noqa: S311
    leader = Leader(random, LockManager())
    for _ in range(6):
        for _ in range(20):
            leader.step()
        original = leader.manager
        loaded = LockManager(original.next_id, original.next_fence)
        records = list(dump(original).items())
        random.shuffle(records)
        decoder = RecordDecoder()
        for id_, record in records:
            request = decoder.decode(id_, record) if seed % 2 else deepcopy(original.table.find(id_))
            assert isinstance(request, Request)
            loaded.adopt(request)
        for _ in range(20):
            check(loaded)
            assert decoded(dump(loaded)) == decoded(dump(original))
            assert queues(loaded) == queues(original)
            assert set(loaded.table.subtrees) == set(original.table.subtrees)
            command = leader.next_command()
            copy = deepcopy(command)
            assert execute(loaded, copy) == execute(original, command)
        for id_ in random.sample(sorted(dump(loaded)), len(dump(loaded))):
            for _ in loaded.discard_in_parts([id_]):
                pass
        table = loaded.table
        assert not table.resources
        assert not table.subtrees
        assert (table.specials, table.locks, table.queue_entries) == (0, 0, 0)


@pytest.mark.soak
@searches
def test_a_former_leader_restores_its_own_requests_like_their_records(seed: int) -> None:
    """Its snapshot has the requests of its lock manager, without some of the waiting ones."""
    random = Random(seed)  # noqa: S311
    leader = Leader(random, LockManager())
    for _ in range(6):
        for _ in range(20):
            leader.step()
        original = leader.manager.table
        waiting = random.sample(list(original.waiting.values()), len(original.waiting) * 2 // 3)
        requests = sorted(deepcopy([*original.held.values(), *waiting]), key=lambda request: request.id)
        decoder = RecordDecoder()
        states = []
        for copies in requests, [decoder.decode(request.id, encode(request)) for request in requests]:
            loaded = LockManager(leader.manager.next_id, leader.manager.next_fence)
            for each in copies:
                assert isinstance(each, Request)
                loaded.adopt(each)
            execute(loaded, Recover())
            check(loaded)
            states.append((decoded(dump(loaded)), queues(loaded)))
        assert states[0] == states[1]


@pytest.mark.soak
@long_searches
def test_a_follower_has_the_state_of_the_leader_after_each_batch(seed: int) -> None:
    """Each batch has several steps. Waiting requests without a session are not stored: here some without a transaction.

    A batch opens its new subtrees together, or each alone.
    """
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(subtrees, "MAX_SEPARATE_SUBTREES", seed % 3)
        follow(seed)


def follow(seed: int) -> None:
    random = Random(seed)  # noqa: S311
    leader, follower, decoder = Leader(random, LockManager()), StateMachine(), RecordDecoder()
    all_stored = seed % 2 == 0
    stored: dict[int, bytes] = {}
    for _ in range(STEPS):
        for _ in range(random.choice([1, 1, 2, 5])):
            leader.step()
        table = leader.manager.table
        current = {
            id_: record for id_, record in dump(leader.manager).items() if all_stored or id_ in table.held or id_ % 3
        }
        changed = [id_ for id_ in current.keys() | stored.keys() if current.get(id_) != stored.get(id_)]
        unchanged = [
            id_ for id_ in current if id_ not in changed and random.random() < 0.1
        ]  # a leader may write them again
        changes = {id_: current[id_] for id_ in [*changed, *unchanged] if id_ in current}
        deleted = dict.fromkeys(id_ for id_ in changed if id_ not in current)
        batch = Batch(
            {id_: decoder.decode(id_, record) for id_, record in changes.items()} | deleted,
            leader.manager.next_id,
            leader.manager.next_fence,
        )
        follower.apply(batch)
        stored = current
        assert decoded(dump(follower.manager)) == decoded(current)
        assert queues(follower.manager) == {
            name: kept
            for name, queue in queues(leader.manager).items()
            if name in follower.manager.table.resources and (kept := [entry for entry in queue if entry[2] in current])
        }
        assert not list(
            find_violations([*follower.manager.table.held.values(), *follower.manager.table.waiting.values()])
        )
        if all_stored:
            check(follower.manager)
            assert set(follower.manager.table.subtrees) == set(table.subtrees)
    execute(follower.manager, Recover())
    successor = Leader(random, follower.manager)
    for _ in range(STEPS):
        check(follower.manager)
        assert not reduce(theory_of(follower.manager).requests, in_queue_order=True)[1]
        successor.step()


def test_the_wait_queue_entries_in_the_queues_of_subtrees_are_limited() -> None:
    """Below 15 subtrees a waiting request has 16 entries, which take several times the memory of one."""
    manager, depth, limit = LockManager(), 15, 1_000
    held = []
    for number in range(depth):
        request = Request(shared=("a/" * (number + 1) + "**",))
        request.details = details_of(request.shared, ())
        manager.request(request, 0.0, limit)
        held.append(request.id)
    waiting = []
    for number in range(limit):
        request = Request(exclusive=("a/" * depth + str(number),))
        if type(manager.request(request, 0.0, limit)[0]) is QueueFull:
            break
        waiting.append(request.id)
    table = manager.table
    assert limit - depth <= table.queue_entries == len(waiting) * (depth + 1) <= limit
    check(manager)
    for id_ in (*held, *waiting):
        manager.release(id_, 0.0)
        check(manager)
    assert (table.queue_entries, table.specials, table.locks) == (0, 0, 0)


def test_requests_of_this_process_are_loaded_again_without_the_intentions_that_they_had() -> None:
    """A leader that has lost its lease and takes over again loads request objects that it has itself."""
    checked = Checked()
    checked.request(Entry(1, 1, (Lock("a/**", "exclusive"),)))
    checked.request(Entry(2, 2, (Lock("a/1", "exclusive"),)))
    checked.request(Entry(3, 3, (Lock("a/1", "exclusive"), Lock("pool", "units", 1, 2))))
    table, loaded = checked.manager.table, LockManager(4, 2)
    for request in (*table.waiting.values(), table.held[1]):
        loaded.adopt(request)
        assert loaded.table.queue_entries == sum(len([*each.queues()]) for each in loaded.table.waiting.values())
        assert loaded.table.detailed == (request.id != 2) + (request.id == 1)
    assert queues(loaded) == queues(checked.manager)
    check(loaded)
