"""`SortedQueue` and `Deadlines` against plain lists and sets."""

from __future__ import annotations

from bisect import insort

from hypothesis import given
from hypothesis import strategies as st

from genie.core import Request, wait_queue
from genie.core.deadlines import Deadlines
from genie.core.wait_queue import SortedQueue
from support.runs.searches import examples

STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "remove"]), st.integers(-3, 3), st.integers(0, 10**6)))


def request_of(owner: str) -> Request:
    request = Request()
    request.owner = owner
    return request


@examples(60)
@given(STEPS, st.integers(2, 8))
def test_a_sorted_queue_equals_a_sorted_list(steps: list[tuple[str, int, int]], chunk: int) -> None:
    wait_queue.MAX_CHUNK, usual = chunk, wait_queue.MAX_CHUNK
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
        wait_queue.MAX_CHUNK, wait_queue.MIN_UNIFORM_CHUNK = usual, usual_uniform


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


def test_removed_deadlines_take_no_memory() -> None:
    deadlines = Deadlines()
    for number in range(200_000):
        deadlines.add(number * 7 % 1_000_003, number)
        deadlines.discard(number * 7 % 1_000_003, number)
    assert len(deadlines._heap) < 3_000
