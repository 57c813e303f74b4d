"""Which rows' dates are compared next, and how many."""

from __future__ import annotations

from genie.timeouts import sweep
from genie.timeouts.sweep import ROWS_PER_RUN, ROWS_PER_SCAN, SCAN_INTERVAL_S, Compared, Scan, Sweep


def compared(first: int, last: int, *, moved: int = 0, wrapped: bool = False, whole: bool = False) -> Compared:
    return Compared(first=first, last=last, wrapped=wrapped, whole=whole, moved=moved)


def test_a_million_rows_are_compared_in_half_a_minute() -> None:
    """Half of the minute within which moved dates are found; the rest is for the runs that hand them over."""
    assert 1_000_000 / ROWS_PER_SCAN * SCAN_INTERVAL_S <= 30


def test_a_moved_date_lets_the_next_run_compare_a_batch_until_one_has_none() -> None:
    state = Sweep(batch=50_000)
    assert state.rows == ROWS_PER_RUN
    state.advance(compared(0, 1_000, moved=1))
    assert (state.rows, state.position) == (50_000, 1_000)
    state.advance(compared(1_000, 51_000, moved=7))
    assert state.catching_up
    state.advance(compared(51_000, 101_000))
    assert (state.catching_up, state.rows, state.position) == (False, ROWS_PER_RUN, 101_000)


def test_a_small_batch_is_not_less_than_a_run_compares_anyway() -> None:
    state = Sweep(batch=1)
    state.advance(compared(0, 1_000, moved=1))
    assert state.rows == ROWS_PER_RUN


def test_where_all_rows_were_compared_no_run_follows_at_once() -> None:
    state = Sweep(batch=50)
    state.advance(compared(10, 10, moved=3, wrapped=True, whole=True))
    assert not state.catching_up


def test_dates_that_can_not_be_copied_do_not_let_it_run_for_ever() -> None:
    state = Sweep(batch=50)
    state.advance(compared(0, 1_000, moved=1))
    rounds = 0
    while state.catching_up:
        rounds += 1
        state.advance(compared(1_000, 500, moved=1, wrapped=True))
    assert rounds == sweep.MAX_ROUNDS
    state.found(7)
    assert (state.position, state.catching_up, state.rounds) == (6, True, 0)


def test_the_slices_between_two_runs_end_where_they_began() -> None:
    scan = Scan(25)
    done = []
    for first, last in ((25, 35), (35, None), (0, 10), (10, 20), (20, 30)):
        assert not scan.complete
        scan.advance(first, last)
        done.append(scan.complete)
    assert done == [False, False, False, False, True]


def test_slices_from_the_beginning_end_at_the_end() -> None:
    for begin in (0, None):
        scan = Scan(begin)
        scan.advance(0, 10)
        assert not scan.complete
        scan.advance(10, None)
        assert scan.complete


def test_a_table_of_one_slice_is_compared_from_its_beginning_too() -> None:
    scan = Scan(3)
    scan.advance(3, None)
    assert not scan.complete
    scan.advance(0, None)
    assert scan.complete
