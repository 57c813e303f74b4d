"""The mutants apply to the current source: the text that each replaces occurs exactly once."""

from __future__ import annotations

import pytest

from conformance import mutants
from conformance.mutation import ROOT, Mutant
from simulation.mutants import MUTANTS
from unit.core import mutants as core_mutants


@pytest.mark.parametrize("mutant", [*MUTANTS, *core_mutants.MUTANTS, *mutants.MUTANTS], ids=str)
def test_the_text_of_a_mutant_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / "genie" / mutant.file).read_text(encoding="utf-8").count(mutant.text) == 1
    assert mutant.replacement != mutant.text
