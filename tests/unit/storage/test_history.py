"""A state is before another, behind it, or on another branch: never two of these."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genie.storage.redis.log import LONGEST, EpochHistory, Position, ends, read_ends, read_position

NUMBERS = st.integers(0, 20)


@st.composite
def walks(draw: st.DrawFn, start: EpochHistory | None = None, epochs: int = 0) -> list[EpochHistory]:
    """All that a namespace comes by: batches of one epoch, then another epoch from there on."""
    history = start or EpochHistory()
    seen, epoch = [history], max(epochs, history.position[0])
    for committed, another in draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12)):
        if another:
            epoch += draw(st.integers(1, 3))
            history = history.at((epoch, 0))
            seen.append(history)
        for _ in range(committed if history.position[0] else 0):
            history = history.at((history.position[0], history.position[1] + 1))
            seen.append(history)
    return seen


@given(walks())
def test_it_includes_what_it_came_by_and_is_ahead_of_all_but_the_last(walk: list[EpochHistory]) -> None:
    last = walk[-1]
    for seen in walk:
        assert last.includes(seen.position)
        assert last.ahead_of(seen.position) == (seen.position != last.position)
        assert seen.includes(last.position) == (seen.position == last.position)
        assert not seen.ahead_of(last.position)


@given(st.data())
def test_of_two_that_went_on_from_one_state_neither_is_before_the_other(data: st.DataObject) -> None:
    walk = data.draw(walks())
    parted = walk[-1]
    branches = [data.draw(walks(parted.at((parted.position[0] + number, 0)))) for number in (1_000, 2_000)]
    for one, other in (branches, branches[::-1]):
        for seen in other:
            assert not one[-1].includes(seen.position)
            assert not one[-1].ahead_of(seen.position)
        for before in walk:
            assert one[-1].ahead_of(before.position)


@given(walks(), st.integers(0, 9))
def test_a_batch_that_was_told_and_lost_is_ahead(walk: list[EpochHistory], lost: int) -> None:
    last = walk[-1]
    epoch, number = last.position
    further = last.at((epoch, number + lost))
    assert further.position == (epoch, number + lost)
    assert further.ahead_of(last.position) == bool(lost)
    assert last.includes(further.position) == (not lost)
    assert further.ends[:-1] == last.ends[:-1]


@given(walks())
def test_it_is_read_as_it_is_stored(walk: list[EpochHistory]) -> None:
    assert EpochHistory(read_ends(ends(walk[-1]).encode())) == walk[-1]


@given(st.integers(LONGEST, 3 * LONGEST))
def test_the_last_epochs_are_remembered(epochs: int) -> None:
    history = EpochHistory()
    for epoch in range(1, epochs + 1):
        history = history.at((epoch, 0)).at((epoch, 5))
    assert len(history.ends) == LONGEST
    assert history.ahead_of((epochs - LONGEST + 1, 5))
    assert not history.includes((epochs - LONGEST, 5))


@given(st.tuples(NUMBERS, NUMBERS))
def test_nothing_is_the_very_beginning(position: Position) -> None:
    assert read_position(b"") == EpochHistory().position == (0, 0)
    assert read_position(f"{position[0]}-{position[1]}".encode()) == position


def test_who_led_without_a_commit_has_not_gone_on() -> None:
    known = EpochHistory(((0, 0), (1, 7), (2, 3)))
    assert EpochHistory(((0, 0), (1, 7), (4, 0), (5, 0))).settled == (1, 7)
    assert EpochHistory(((0, 0), (3, 0))).settled == (0, 0)
    assert known.knows_more_than(EpochHistory(((0, 0), (1, 7), (4, 0), (5, 0))))
    assert known.knows_more_than(EpochHistory(((0, 0), (1, 5))))
    assert not known.knows_more_than(EpochHistory(((0, 0), (1, 7), (4, 1)))), "who committed there has told something"
    assert not known.knows_more_than(known.at((6, 0)))
    assert not known.at((3, 0)).knows_more_than(known)
    assert not known.knows_more_than(EpochHistory(((0, 0), (1, 9))))


def test_a_state_with_what_was_told_to_nobody_is_none_that_somebody_saw() -> None:
    known, found = EpochHistory(((0, 0), (1, 7), (2, 3))), EpochHistory(((0, 0), (1, 8), (4, 0)))
    assert not known.knows_more_than(found)
    assert known.knows_more_than(found.without([(1, 8)]))
    assert not known.knows_more_than(found.without([(1, 7), (4, 8)]))
