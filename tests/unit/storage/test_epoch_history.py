"""A state is before another, behind it, or on another branch: never two of these."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genie.storage.redis.log import MAX_EPOCHS, EpochHistory, Position, decode_ends, decode_position, encode_ends

NUMBERS = st.integers(0, 20)


@st.composite
def walks(draw: st.DrawFn, start: EpochHistory | None = None, epochs: int = 0) -> list[EpochHistory]:
    """All that a namespace comes by: batches of one epoch, then another epoch from there on."""
    history = start or EpochHistory()
    seen, epoch = [history], max(epochs, history.position[0])
    for committed, another in draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12)):
        if another:
            epoch += draw(st.integers(1, 3))
            history = history.advanced_to((epoch, 0))
            seen.append(history)
        for _ in range(committed if history.position[0] else 0):
            history = history.advanced_to((history.position[0], history.position[1] + 1))
            seen.append(history)
    return seen


@given(walks())
def test_a_history_contains_its_past_and_extends_all_but_the_last(walk: list[EpochHistory]) -> None:
    last = walk[-1]
    for seen in walk:
        assert last.contains(seen.position)
        assert last.extends(seen.position) == (seen.position != last.position)
        assert seen.contains(last.position) == (seen.position == last.position)
        assert not seen.extends(last.position)


@given(st.data())
def test_of_two_forks_neither_contains_the_other(data: st.DataObject) -> None:
    walk = data.draw(walks())
    parted = walk[-1]
    branches = [data.draw(walks(parted.advanced_to((parted.position[0] + number, 0)))) for number in (1_000, 2_000)]
    for one, other in (branches, branches[::-1]):
        for seen in other:
            assert not one[-1].contains(seen.position)
            assert not one[-1].extends(seen.position)
        for before in walk:
            assert one[-1].extends(before.position)


@given(walks(), st.integers(0, 9))
def test_a_lost_commit_is_an_extension(walk: list[EpochHistory], lost: int) -> None:
    last = walk[-1]
    epoch, number = last.position
    further = last.advanced_to((epoch, number + lost))
    assert further.position == (epoch, number + lost)
    assert further.extends(last.position) == bool(lost)
    assert last.contains(further.position) == (not lost)
    assert further.ends[:-1] == last.ends[:-1]


@given(walks())
def test_a_history_is_decoded_as_encoded(walk: list[EpochHistory]) -> None:
    assert EpochHistory(decode_ends(encode_ends(walk[-1]).encode())) == walk[-1]


@given(st.integers(MAX_EPOCHS, 3 * MAX_EPOCHS))
def test_the_last_epochs_are_remembered(epochs: int) -> None:
    history = EpochHistory()
    for epoch in range(1, epochs + 1):
        history = history.advanced_to((epoch, 0)).advanced_to((epoch, 5))
    assert len(history.ends) == MAX_EPOCHS
    assert history.extends((epochs - MAX_EPOCHS + 1, 5))
    assert not history.contains((epochs - MAX_EPOCHS, 5))


@given(st.tuples(NUMBERS, NUMBERS))
def test_an_empty_position_is_the_beginning(position: Position) -> None:
    assert decode_position(b"") == EpochHistory().position == (0, 0)
    assert decode_position(f"{position[0]}-{position[1]}".encode()) == position


def test_epochs_without_a_commit_do_not_count() -> None:
    known = EpochHistory(((0, 0), (1, 7), (2, 3)))
    assert EpochHistory(((0, 0), (1, 7), (4, 0), (5, 0))).last_committed == (1, 7)
    assert EpochHistory(((0, 0), (3, 0))).last_committed == (0, 0)
    assert known.has_commits_beyond(EpochHistory(((0, 0), (1, 7), (4, 0), (5, 0))))
    assert known.has_commits_beyond(EpochHistory(((0, 0), (1, 5))))
    assert not known.has_commits_beyond(EpochHistory(((0, 0), (1, 7), (4, 1)))), (
        "who committed there has told something"
    )
    assert not known.has_commits_beyond(known.advanced_to((6, 0)))
    assert not known.advanced_to((3, 0)).has_commits_beyond(known)
    assert not known.has_commits_beyond(EpochHistory(((0, 0), (1, 9))))


def test_unacknowledged_batches_are_left_out_of_a_comparison() -> None:
    known, found = EpochHistory(((0, 0), (1, 7), (2, 3))), EpochHistory(((0, 0), (1, 8), (4, 0)))
    assert not known.has_commits_beyond(found)
    assert known.has_commits_beyond(found.without([(1, 8)]))
    assert not known.has_commits_beyond(found.without([(1, 7), (4, 8)]))
