"""`SortedQueue` and `Deadlines` against plain lists and sets."""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.core import Request, wait_queue
from genie.core import deadlines as deadlines_module
from genie.core.deadlines import Deadlines
from genie.core.lock_table import earlier
from genie.core.model import QueueEntry, details_of
from genie.core.wait_queue import SortedQueue, UnitQueue
from support.runs.searches import examples
from work.opcodes import OpcodeCounter

STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "remove"]), st.integers(-3, 3), st.integers(0, 10**6)))


def request_of(owner: str) -> Request:
    request = Request()
    request.owner = owner
    request.details = details_of((), (), {"a": (1, 10)})
    return request


def has_short_chunks(queue: SortedQueue) -> bool:
    """Return whether two adjacent chunks have less than half of the entries of one chunk."""
    return any(len(one) + len(other) <= queue.max_chunk // 2 for one, other in pairwise(queue._chunks))


@pytest.mark.parametrize("queue", [SortedQueue(), UnitQueue("a")], ids=["SortedQueue", "UnitQueue"])
def test_a_queue_of_which_most_entries_are_removed_has_few_chunks(
    queue: SortedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(queue), "max_chunk", 16)
    removed, left = list[QueueEntry](), list[QueueEntry]()
    for ticket in range(0, 3_200, 16):
        added = [(0.0, ticket + number, request_of("T")) for number in range(16)]
        for entry in added:
            queue.add(entry)
        for entry in removed:
            queue.remove(entry)
        removed, left = added[1:], [*left, added[0]]
    assert list(queue) == [*left, *removed]
    assert len(queue._chunks) <= 4 * len(queue) // 16 + 1
    assert not has_short_chunks(queue)


@examples(60)
@given(STEPS, st.integers(2, 8))
def test_a_sorted_queue_equals_a_sorted_list(steps: list[tuple[str, int, int]], chunk: int) -> None:
    SortedQueue.max_chunk, usual = chunk, SortedQueue.max_chunk
    wait_queue.MIN_UNIFORM_CHUNK, usual_uniform = 0, wait_queue.MIN_UNIFORM_CHUNK
    try:
        queue, plain = SortedQueue(), []
        for ticket, (what, priority, where) in enumerate(steps):
            if what == "add":
                entry = (float(priority), ticket, request_of("other" if where % 4 == 0 else "T"))
                queue.add(entry)
                insort(plain, entry, key=lambda e: e[:2])
            elif plain:
                queue.remove(plain.pop(where % len(plain)))
            assert list(queue) == plain
            assert not has_short_chunks(queue)
            assert (len(queue), bool(queue)) == (len(plain), bool(plain))
            assert queue.first == (plain[0] if plain else None)
            assert queue.last == (plain[-1] if plain else None)
            for owner in ("T", "other"):
                other = next((entry for entry in plain if entry[2].owner != owner), None)
                assert queue.first_not_owned_by(owner) == other
                for entry in plain[where % 3 :: 3]:
                    assert queue.has_other_before(entry, owner) == (other is not None and other < entry)
        for i, entry in enumerate(plain):
            assert queue.before(entry) == (plain[i - 1] if i else None)
            assert queue.after(entry) == (plain[i + 1] if i + 1 < len(plain) else None)
            assert list(queue.between(entry, None)) == plain[i + 1 :]
            assert list(queue.between(None, entry)) == plain[:i]
            for j in range(i + 1, len(plain)):
                assert list(queue.between(entry, plain[j])) == plain[i + 1 : j]
    finally:
        SortedQueue.max_chunk, wait_queue.MIN_UNIFORM_CHUNK = usual, usual_uniform


def test_the_search_after_a_position_ignores_another_request_that_has_the_position_now() -> None:
    queue, entries = SortedQueue(), [(0.0, ticket, request_of("T")) for ticket in range(3)]
    for entry in entries:
        queue.add(entry)
    left = (0.0, 1, request_of("U"))
    assert [*queue.between(left, None)] == entries[2:]
    assert [*queue.between(None, left)] == entries[:1]
    assert queue.before(left) == entries[0]
    assert queue.after(left) == entries[2]
    assert not queue.has_other_before((0.0, 0, request_of("U")), "U")
    assert earlier(left, entries[1]) == left


@examples(60)
@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove"]), st.integers(-3, 3), st.integers(0, 10**6))))
def test_the_units_before_a_waiter_are_those_of_a_sorted_list(steps: list[tuple[str, int, int]]) -> None:
    UnitQueue.max_chunk, usual = 4, UnitQueue.max_chunk
    try:
        queue, plain = UnitQueue("a"), list[QueueEntry]()
        for ticket, (what, priority, where) in enumerate(steps):
            if what == "add":
                request = Request()
                request.details = details_of((), (), {"a": (where % 5 + 1, where % 70 + 30)})
                queue.add(entry := (float(priority), ticket, request))
                insort(plain, entry, key=lambda e: e[:2])
            elif plain:
                queue.remove(plain.pop(where % len(plain)))
            assert not has_short_chunks(queue)
            chunk_ids, with_sum = [*map(id, queue._chunks)], queue._chunk_sums.keys()
            assert with_sum <= {*chunk_ids}
            assert with_sum >= {*chunk_ids[1:-1]}
            for limit in (20, 10**6):
                last = [] if not plain else [(plain[where % len(plain)], included) for included in (False, True)]
                for entry, included in [(None, False), *last]:
                    earlier = plain if entry is None else plain[: plain.index(entry) + included]
                    units = sum(each[2].units["a"][0] for each in earlier)
                    smallest = min([limit, *(each[2].units["a"][1] for each in earlier)])
                    found = queue.add_units_before((0, limit), entry, included=included)
                    assert found == (units, smallest) or (found[0] >= found[1] and units >= smallest)
    finally:
        UnitQueue.max_chunk = usual


@examples(60)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "discard", "expired"]), st.integers(0, 50), st.integers(0, 50)))
)
def test_deadlines_equal_a_sorted_set(steps: list[tuple[str, int, int]]) -> None:
    deadlines = Deadlines()
    plain: set[tuple[int, int]] = set()
    for number, (what, tick, limit) in enumerate(steps):
        if what == "add":
            deadlines.add(tick, number)
            plain.add((tick, number))
        elif what == "discard" and plain:
            removed = sorted(plain)[tick % len(plain)]
            deadlines.discard(*removed)
            plain.remove(removed)
        elif what == "expired":
            assert deadlines.expired(tick, limit) == [id_ for when, id_ in sorted(plain) if when <= tick][:limit]
        assert deadlines.next == (min(plain)[0] if plain else float("inf"))


@pytest.fixture(name="small_chunks")
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines_module, "MAX_CHUNK", 4)
    monkeypatch.setattr(deadlines_module, "FEW_TICKS", 7)
    monkeypatch.setattr(deadlines_module, "MAX_EMPTY_TICKS", 5)
    monkeypatch.setattr(deadlines_module, "MAX_SORTED_IDS", 3)


@pytest.mark.usefixtures("small_chunks")
def test_all_ids_expire_in_the_order_of_their_deadlines() -> None:
    """Although calls read few empty ticks and sort few ids, all ids are found; `next` is never too late."""
    chance = random.Random(5)  # noqa: S311
    for _ in range(200):
        deadlines = Deadlines()
        added: set[tuple[int, int]] = set()
        for id_ in range(chance.randrange(1, 100)):
            tick = chance.randrange(60)
            deadlines.add(tick, id_)
            added.add((tick, id_))
            if chance.random() < 0.5:
                removed = chance.choice(sorted(added))
                deadlines.discard(*removed)
                added.remove(removed)
        found: list[tuple[int, int]] = []
        ticks = {id_: tick for tick, id_ in added}
        while deadlines.next < float("inf"):
            assert deadlines.next <= min((tick for tick, _ in added), default=60)
            for id_ in deadlines.expired(deadlines.next, chance.randrange(1, 5)):
                found.append((ticks[id_], id_))
                deadlines.discard(ticks[id_], id_)
                added.remove((ticks[id_], id_))
        assert [tick for tick, _ in found] == sorted(ticks.values())
        assert not added
        assert not deadlines._ticks
        assert not deadlines._chunks
        assert not deadlines._lasts


def test_removed_deadlines_take_no_memory() -> None:
    deadlines = Deadlines()
    for number in range(200_000):
        deadlines.add(number * 7 % 1_000_003, number)
        deadlines.discard(number * 7 % 1_000_003, number)
    assert len(deadlines._ticks) < 1_100
    for number in range(20_000):
        deadlines.add(number, number)
    for number in range(20_000):
        deadlines.discard(number, number)
        deadlines.add(number * 7 % 1_000_003 + 20_000, number)
    assert len(deadlines._ticks) < 30_000


def test_no_call_reads_all_deadlines() -> None:
    """Many ticks are added in any order, become empty, and their places are taken by others; in the end all are empty."""
    deadlines = Deadlines()
    number = 20_000
    counts = {"add": 0, "discard": 0, "next": 0, "expired": 0}

    def count(name: str, call: Callable[[], object]) -> None:
        counter = OpcodeCounter()
        counter.start()
        try:
            call()
        finally:
            counter.stop()
        counts[name] = max(counts[name], counter.count)

    for id_ in range(number):
        count("add", lambda id_=id_: deadlines.add(id_ * 7 % 20_011, id_))  # type: ignore[misc]
    for id_ in range(number):
        deadlines.discard(id_ * 7 % 20_011, id_)
        if id_ % 4:
            count("add", lambda id_=id_: deadlines.add(id_ * 11 % 20_011 + 20_011, id_))  # type: ignore[misc]
    for id_ in range(number):
        if id_ % 4:
            count("discard", lambda id_=id_: deadlines.discard(id_ * 11 % 20_011 + 20_011, id_))  # type: ignore[misc]
    deadlines.add(50_000, 1)
    for _ in range(100):
        count("next", lambda: deadlines.next)
        count("expired", lambda: deadlines.expired(49_000, 1_000))
    assert counts["add"] < 300
    assert counts["discard"] < 50
    assert max(counts.values()) < 100 * deadlines_module.MAX_EMPTY_TICKS
    assert deadlines.next == 50_000
    assert len(deadlines._ticks) == 1


class CountedId(int):
    """An id that counts how often it is compared or looked up."""

    __slots__ = ()
    reads = 0

    def __lt__(self, other: int) -> bool:
        CountedId.reads += 1
        return int(self) < int(other)

    def __hash__(self) -> int:
        CountedId.reads += 1
        return int(self)


def test_very_many_ids_of_one_tick_are_not_sorted_at_once() -> None:
    deadlines = Deadlines()
    for id_ in range(50_000, 0, -1):
        deadlines.add(7, CountedId(id_))
    ended: list[int] = []
    while len(ended) < 50_000:
        CountedId.reads = 0
        ids = deadlines.expired(7, 1_000)
        assert CountedId.reads <= 3 * deadlines_module.MAX_SORTED_IDS
        assert len(ids) == 1_000
        assert ids == sorted(ids)
        for id_ in ids:
            deadlines.discard(7, id_)
        ended += ids
    assert sorted(ended) == list(range(1, 50_001))
