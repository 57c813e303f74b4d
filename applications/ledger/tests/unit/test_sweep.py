"""`Sweep` and `IdleSweep`: which rows are compared next, and how many."""

from __future__ import annotations

from genie_ledger.sweep import ROWS_PER_RUN, ROWS_PER_SLICE, SLICE_INTERVAL_S, Compared, IdleSweep, Phase, Sweep


def compared(first: int, last: int, *, moved: bool = False, wrapped: bool = False, whole: bool = False) -> Compared:
    return Compared(first=first, last=last, wrapped=wrapped, covers_table=whole, found_rescheduled=moved)


def test_a_million_rows_are_compared_in_half_a_minute() -> None:
    """Moved dates must be found within a minute. The other half is for the runs that deliver the transfers."""
    assert 1_000_000 / ROWS_PER_SLICE * SLICE_INTERVAL_S <= 30


def test_after_a_moved_date_runs_process_overdue_rows_and_then_all_moved_rows() -> None:
    state = Sweep(batch_size=50_000)
    assert (state.row_count, state.phase) == (ROWS_PER_RUN, Phase.SAMPLE)
    state.advance(compared(0, 1_000, moved=True))
    assert (state.row_count, state.position, state.phase) == (50_000, 1_000, Phase.OVERDUE)
    state.advance(compared(1_000, 51_000, moved=True))
    assert (state.position, state.phase) == (51_000, Phase.OVERDUE)
    state.advance(compared(51_000, 101_000))
    assert (state.position, state.phase) == (1_000, Phase.COPY)
    state.advance(compared(1_000, 51_000, moved=True))
    assert (state.row_count, state.position, state.phase) == (50_000, 51_000, Phase.COPY)
    state.advance(compared(51_000, 101_000))
    assert (state.row_count, state.position, state.phase) == (ROWS_PER_RUN, 101_000, Phase.SAMPLE)


def test_a_run_compares_at_least_rows_per_run() -> None:
    state = Sweep(batch_size=1)
    state.advance(compared(0, 1_000, moved=True))
    assert state.row_count == ROWS_PER_RUN


def test_no_phase_begins_if_all_rows_were_compared() -> None:
    state = Sweep(batch_size=50)
    state.advance(compared(10, 10, moved=True, wrapped=True, whole=True))
    assert state.phase is Phase.SAMPLE


def test_each_phase_compares_all_rows_at_most_once() -> None:
    """Moved dates that can't be copied are found in each round, and must not prolong a phase."""
    state = Sweep(batch_size=50)
    state.start_at(61)
    phases = []
    for first, last, wrapped in ((60, 110, False), (110, 10, True), (10, 60, False)) * 2:
        assert state.position == first
        phases.append(state.phase)
        state.advance(compared(first, last, moved=True, wrapped=wrapped))
    assert phases == [Phase.OVERDUE] * 3 + [Phase.COPY] * 3
    assert state.phase is Phase.SAMPLE


def test_an_idle_sweep_ends_where_it_began() -> None:
    scan = IdleSweep(25)
    done = []
    for first, last in ((25, 35), (35, None), (0, 10), (10, 20), (20, 30)):
        assert not scan.complete
        scan.advance(first, last)
        done.append(scan.complete)
    assert done == [False, False, False, False, True]


def test_an_idle_sweep_from_the_first_row_ends_after_the_last() -> None:
    for begin in (0, None):
        scan = IdleSweep(begin)
        scan.advance(0, 10)
        assert not scan.complete
        scan.advance(10, None)
        assert scan.complete


def test_a_table_of_one_slice_wraps_to_its_first_row() -> None:
    scan = IdleSweep(3)
    scan.advance(3, None)
    assert not scan.complete
    scan.advance(0, None)
    assert scan.complete
