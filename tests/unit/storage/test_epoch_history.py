"""Of two states either one is an ancestor of the other, or they are on a fork."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genie.storage.redis.log import MAX_EPOCHS, EpochHistory, Position, decode_ends, decode_position, encode_ends

NUMBERS = st.integers(0, 20)


@st.composite
def lineages(draw: st.DrawFn, start: EpochHistory | None = None, epochs: int = 0) -> list[EpochHistory]:
    """Generate the histories of a namespace, each one commit or epoch later than the one before."""
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


@given(lineages())
def test_a_history_contains_and_extends_its_ancestors(lineage: list[EpochHistory]) -> None:
    last = lineage[-1]
    for history in lineage:
        assert last.contains(history.position)
        assert last.extends(history.position) == (history.position != last.position)
        assert history.contains(last.position) == (history.position == last.position)
        assert not history.extends(last.position)


@given(st.data())
def test_after_a_fork_neither_lineage_contains_the_other(data: st.DataObject) -> None:
    lineage = data.draw(lineages())
    fork = lineage[-1]
    forks = [data.draw(lineages(fork.advanced_to((fork.position[0] + number, 0)))) for number in (1_000, 2_000)]
    for one, other in (forks, forks[::-1]):
        for history in other:
            assert not one[-1].contains(history.position)
            assert not one[-1].extends(history.position)
        for before in lineage:
            assert one[-1].extends(before.position)


@given(lineages(), st.integers(0, 9))
def test_a_history_with_later_commits_extends_one_without(lineage: list[EpochHistory], lost: int) -> None:
    last = lineage[-1]
    epoch, number = last.position
    further = last.advanced_to((epoch, number + lost))
    assert further.position == (epoch, number + lost)
    assert further.extends(last.position) == bool(lost)
    assert last.contains(further.position) == (not lost)
    assert further.ends[:-1] == last.ends[:-1]


@given(lineages())
def test_the_history_up_to_a_position_is_that_of_the_state_at_that_position(lineage: list[EpochHistory]) -> None:
    last = lineage[-1]
    for history in lineage:
        assert last.up_to(history.position) == history


@given(lineages())
def test_a_history_is_decoded_as_encoded(lineage: list[EpochHistory]) -> None:
    assert EpochHistory(decode_ends(encode_ends(lineage[-1].ends).encode())) == lineage[-1]


@given(st.integers(MAX_EPOCHS, 3 * MAX_EPOCHS))
def test_a_history_is_limited_to_the_last_epochs(epochs: int) -> None:
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


def test_epochs_without_a_commit_are_ignored() -> None:
    own = EpochHistory(((0, 0), (1, 7), (2, 3)))
    assert EpochHistory(((0, 0), (1, 7), (4, 0), (5, 0))).last_committed == (1, 7)
    assert EpochHistory(((0, 0), (3, 0))).last_committed == (0, 0)
    assert own.has_commits_beyond(EpochHistory(((0, 0), (1, 7), (4, 0), (5, 0))))
    assert own.has_commits_beyond(EpochHistory(((0, 0), (1, 5))))
    assert not own.has_commits_beyond(EpochHistory(((0, 0), (1, 7), (4, 1)))), "that commit may have been acknowledged"
    assert not own.has_commits_beyond(own.advanced_to((6, 0)))
    assert not own.advanced_to((3, 0)).has_commits_beyond(own)
    assert not own.has_commits_beyond(EpochHistory(((0, 0), (1, 9))))


def test_unacknowledged_batches_are_ignored() -> None:
    own, stored = EpochHistory(((0, 0), (1, 7), (2, 3))), EpochHistory(((0, 0), (1, 8), (4, 0)))
    assert not own.has_commits_beyond(stored)
    assert own.has_commits_beyond(stored.without([(1, 8)]))
    assert not own.has_commits_beyond(stored.without([(1, 7), (4, 8)]))
