"""The lock manager against the specification's algorithm, event by event."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from support.core.driver import Driver
from support.runs.searches import examples
from unit.core.oracle import Oracle

NAMES = "ABCD"
MODES = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["shared", "exclusive"]), min_size=1, max_size=3)


class SpecificationMachine(RuleBasedStateMachine):
    """Without transactions the specified rule never deadlocks, unless a priority overtakes."""

    def __init__(self) -> None:
        super().__init__()
        self.driver, self.oracle = Driver(), Oracle()

    def check_equal_events(self, actual: list[tuple[object, ...]], expected: list[tuple[object, ...]]) -> None:
        assert actual == expected

    @rule(modes=MODES, queue=st.sampled_from([0, 3, 50, 10_000]), held=st.sampled_from([1, 4, 50, 10_000]))
    def request(self, modes: dict[str, str], queue: int, held: int) -> None:
        resources = [name if mode == "exclusive" else f"shared:{name}" for name, mode in modes.items()]
        actual = self.driver.request(*resources, queue_timeout_ms=queue, transaction_timeout_ms=held)
        expected = self.oracle.request(modes, self.driver.now, queue_timeout_ms=queue, transaction_timeout_ms=held)
        self.check_equal_events(actual, expected)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        live_ids = [request.id for request in [*self.oracle.held, *self.oracle.queue]]
        if live_ids:
            id_ = data.draw(st.sampled_from(sorted(live_ids)))
            self.check_equal_events(self.driver.release(id_), self.oracle.release(id_, self.driver.now))

    @rule(elapsed_ms=st.integers(0, 20))
    def advance_clock(self, elapsed_ms: int) -> None:
        actual = self.driver.at(self.driver.now + elapsed_ms)
        self.check_equal_events(actual, self.oracle.expire(self.driver.now))

    @rule()
    def restart(self) -> None:
        self.driver.reload()

    @invariant()
    def queues_are_equal(self) -> None:
        for name in NAMES:
            assert self.driver.queue(name) == [request.id for request in self.oracle.queue if name in request.modes]


class OneResourcePriorities(SpecificationMachine):
    """With one resource per request, priorities close no cycle either."""

    @rule(
        name=st.sampled_from(NAMES),
        mode=st.sampled_from(["shared", "exclusive"]),
        priority=st.sampled_from([-1, 0, 0.5, 7]),
        queue=st.sampled_from([0, 5, 10_000]),
    )
    def request(self, name: str, mode: str, priority: float, queue: int) -> None:  # type: ignore[override]
        resource = name if mode == "exclusive" else f"shared:{name}"
        actual = self.driver.request(resource, priority=priority, queue_timeout_ms=queue)
        expected = self.oracle.request({name: mode}, self.driver.now, priority=priority, queue_timeout_ms=queue)
        self.check_equal_events(actual, expected)


TestSpecificationMachine = SpecificationMachine.TestCase
TestSpecificationMachine.settings = examples(30, stateful_step_count=40)
TestOneResourcePriorities = OneResourcePriorities.TestCase
TestOneResourcePriorities.settings = examples(20, stateful_step_count=40)
