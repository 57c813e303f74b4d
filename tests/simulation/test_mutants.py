"""The mutants fit the code that there is: each finds the text that it changes, once."""

from __future__ import annotations

import pytest

from simulation.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_finds_its_text(mutant: Mutant) -> None:
    assert (ROOT / "genie" / mutant.file).read_text().count(mutant.text) == 1
    assert mutant.other != mutant.text
