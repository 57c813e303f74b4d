"""The mutants apply to the current source: the text that each replaces occurs exactly once."""

from __future__ import annotations

import pytest

from simulation.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_a_mutant_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / "genie" / mutant.file).read_text().count(mutant.text) == 1
    assert mutant.replacement != mutant.text
