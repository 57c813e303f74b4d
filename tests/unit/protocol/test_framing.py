from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.protocol.framing import MAX_PART_LINES, LineReader, LineTooLong, UnsplitLines


@given(st.lists(st.binary(max_size=12)), st.lists(st.integers(1, 9), min_size=1))
def test_lines_do_not_depend_on_how_the_bytes_arrive(parts: list[bytes], cuts: list[int]) -> None:
    stream = b"\n".join(parts)
    lines, got, place, turn = LineReader(1000), [], 0, 0
    while place < len(stream):
        size = cuts[turn % len(cuts)]
        got += lines.feed(stream[place : place + size])
        place, turn = place + size, turn + 1
    assert got == stream.split(b"\n")[:-1]


@pytest.mark.parametrize("step", [1, 3, 10, 11, 12, 30])
@pytest.mark.parametrize("size", [9, 10, 11, 12, 25])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_over_the_limit_is_rejected(step: int, size: int, end: bytes) -> None:
    stream = b"ok\n" + b"x" * size + end + b"behind\n"
    lines, got = LineReader(10), []
    try:
        for place in range(0, len(stream), step):
            got += lines.feed(stream[place : place + step])
    except LineTooLong as too_long:
        got += too_long.lines
        assert size > 10
        assert got == [b"ok"]
    else:
        assert size <= 10
        assert len(got) == 3


def test_an_endless_line_is_not_buffered() -> None:
    lines = LineReader(100)
    with pytest.raises(LineTooLong):
        for _ in range(200):
            lines.feed(b"x")
    assert len(lines.partial) <= 102


@given(
    st.lists(st.tuples(st.sampled_from([b"", b"x", b"xyz", b"y" * 100, b"z" * 9_000]), st.integers(1, 700)), max_size=5)
)
def test_a_part_of_large_input_has_a_bounded_number_of_lines(groups: list[tuple[bytes, int]]) -> None:
    lines = [line for line, count in groups for _ in range(count)]
    unsplit, parts = UnsplitLines(b"".join(line + b"\n" for line in lines)), []
    while unsplit:
        parts.append(unsplit.split_next())
    assert [line for part in parts for line in part] == lines
    assert all(len(part) <= MAX_PART_LINES for part in parts)
