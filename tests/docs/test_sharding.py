"""docs/concepts/sharding.md : the tables that take no time are those that the model prints."""

from __future__ import annotations

import pytest
from pages import read

from benchmarks.sharding import PARTS, main

PAGE = "docs/concepts/sharding.md"
QUICK = ("reach", "examples")


@pytest.mark.parametrize("part", QUICK)
def test_a_table_is_what_the_model_prints(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([part]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = read(PAGE)
    start = page.index(rows[0])
    assert page[start : start + len(rows)] == rows


def test_every_part_has_its_table() -> None:
    heads = [tuple(next(part(1))) for part in PARTS]
    page = read(PAGE)
    assert all(f"| {' | '.join(head)} |" in page for head in heads)
