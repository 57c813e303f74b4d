"""Deadlocks and queue rearrangement against an independent model.

The model is slow and shares no code: it takes the queues as they were, inserts the new request
where the grant rule puts it, and compares every pair of requests.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from genie import core
from simulator.invariants import conflict
from support.core.driver import Driver
from support.runs.searches import examples

NAMES = "ABCDE"
OWNERS = [None, None, "T1", "T2", "T3", "T4", "T5"]
Edges = dict[object, set[object]]


def queues_of(driver: Driver) -> dict[str, list[core.Request]]:
    return {name: [driver.requests[id_] for id_ in driver.queue(name)] for name in NAMES}


def hard_edges(driver: Driver, queues: dict[str, list[core.Request]]) -> Edges:
    edges: Edges = {}
    for name, queue in queues.items():
        resource = driver.manager.table.lookup(name)
        for request in queue:
            for holder in () if resource is None else resource.holders.values():
                if conflict(request, holder, name):
                    edges.setdefault(request.owner, set()).add(holder.owner)
    return edges


def soft_edges(queues: dict[str, list[core.Request]]) -> Edges:
    edges: Edges = {}
    for name, queue in queues.items():
        for position, request in enumerate(queue):
            for other in queue[:position]:
                if conflict(request, other, name):
                    edges.setdefault(request.owner, set()).add(other.owner)
    return edges


def reachable_owners(edges: Edges, start: object) -> set[object]:
    visited: set[object] = set()
    stack = [start]
    while stack:
        for other in edges.get(stack.pop(), ()):
            if other not in visited:
                visited.add(other)
                stack.append(other)
    return visited


class DeadlockMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()

    @rule(
        modes=st.dictionaries(st.sampled_from(NAMES), st.booleans(), min_size=1, max_size=3),
        owner=st.sampled_from(OWNERS),
        priority=st.sampled_from([0, 0, 0, 1, 5]),
        attempt=st.booleans(),
    )
    def request(self, modes: dict[str, bool], owner: str | None, priority: int, attempt: bool) -> None:
        driver = self.driver
        before = queues_of(driver)
        new_request = core.Request(
            exclusive=tuple(name for name, exclusive in modes.items() if exclusive),
            shared=tuple(name for name, exclusive in modes.items() if not exclusive),
            transaction=owner,
            priority=priority,
            queue_timeout_ms=0 if attempt else 10_000,
        )
        new_request.owner = driver.manager.next_id if owner is None else owner
        expected = {name: list(queue) for name, queue in before.items()}
        for name in modes:
            not_lower = [i for i, other in enumerate(expected[name]) if other.priority >= priority]
            expected[name].insert(not_lower[-1] + 1 if not_lower else 0, new_request)
        hard = hard_edges(driver, expected)
        is_deadlock = new_request.owner in reachable_owners(hard, new_request.owner)
        soft = soft_edges(expected)
        graph = {owner: hard.get(owner, set()) | soft.get(owner, set()) for owner in {*hard, *soft}}
        reachable = reachable_owners(graph, new_request.owner)
        cycle = {other for other in reachable if new_request.owner in reachable_owners(graph, other)}

        events = driver.step(new_request)  # checks the invariants: no conflict, no cycle, no grantable waiter

        releases = [event for event in events if isinstance(event, core.Released)]
        assert [event.request for event in releases] in ([], [new_request])
        reason = releases[0].reason if releases else None
        assert (reason is core.Reason.DEADLOCK) == is_deadlock
        if is_deadlock:
            self.check_reported_cycle(releases[0], hard)
        if attempt:
            assert new_request.state is not core.State.WAITING
        after = queues_of(driver)
        if new_request.state is core.State.ENDED:
            assert after == before
        elif not cycle:
            self.check_only_ended_requests_left(expected, after)
        self.check_other_requests_keep_their_order(expected, after, cycle)

    def check_reported_cycle(self, event: core.Released, hard: Edges) -> None:
        cycle = event.cycle
        assert cycle is not None
        assert cycle.owners[0] == event.request.owner
        assert len(set(cycle.owners)) == len(cycle.owners) == len(cycle.waits)
        for (waiter, holder), wait in zip(pairwise([*cycle.owners, cycle.owners[0]]), cycle.waits, strict=True):
            assert holder in hard[waiter]
            one, other = self.driver.requests[wait.waiter], self.driver.requests[wait.holder]
            assert (one.owner, other.owner) == (waiter, holder)
            assert conflict(one, other, wait.resource)
            assert other.state is core.State.HELD

    def check_only_ended_requests_left(
        self, expected: dict[str, list[core.Request]], after: dict[str, list[core.Request]]
    ) -> None:
        for name in NAMES:
            assert after[name] == [request for request in expected[name] if request.state is core.State.WAITING]

    def check_other_requests_keep_their_order(
        self, expected: dict[str, list[core.Request]], after: dict[str, list[core.Request]], cycle: set[object]
    ) -> None:
        for name in NAMES:
            position = {request: i for i, request in enumerate(after[name])}
            waiting = [request for request in expected[name] if request in position]
            for i, one in enumerate(waiting):
                for other in waiting[i + 1 :]:
                    outside = [request.owner not in cycle for request in (one, other)]
                    if all(outside) or (any(outside) and conflict(one, other, name)):
                        assert position[one] < position[other]

        for name in NAMES:
            before = {request: i for i, request in enumerate(expected[name])}
            if any(request.state is core.State.HELD and name in request.exclusive for request in expected[name]):
                continue  # it was between two runs and has left the queue
            for one, other in pairwise(after[name]):
                if name in one.shared and name in other.shared:
                    assert before[one] < before[other], "neighbours that go together keep their order"

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.driver.manager.table
        live_ids = sorted([*table.held, *table.waiting])
        if live_ids:
            before = queues_of(self.driver)
            self.driver.release(data.draw(st.sampled_from(live_ids)))
            self.check_only_ended_requests_left(before, queues_of(self.driver))

    @rule()
    def restart(self) -> None:
        before = {name: self.driver.queue(name) for name in NAMES}
        self.driver.reload()
        assert {name: self.driver.queue(name) for name in NAMES} == before

    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        table = self.driver.manager.table
        if table.waiting:
            disconnected = data.draw(st.lists(st.sampled_from(sorted(table.waiting)), unique=True))
            self.driver.step(core.Disconnect([table.waiting[id_] for id_ in disconnected]))
            assert not set(disconnected) & {*table.waiting, *table.held}

    def teardown(self) -> None:
        """If holders release, every waiter is granted in the end."""
        table = self.driver.manager.table
        for _ in range(len(table.waiting) + len(table.held)):
            if table.held:
                self.driver.release(min(table.held))
        assert not table.held
        assert not table.waiting


TestDeadlockMachine = DeadlockMachine.TestCase
TestDeadlockMachine.settings = examples(50, stateful_step_count=50)
