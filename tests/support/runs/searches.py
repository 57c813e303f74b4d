"""How many cases the random searches of the tests try: a few, always the same ones, in `make test`; many, others each time,
in `make soak-tests`.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

SOAK = os.environ.get("GENIE_TESTS_SOAK") == "1"
"""True if this is the long run. `make soak-tests` sets the variable."""
FACTOR = 50
"""How many times as many examples each search tries then."""


FIRST_SEED = int(os.environ.get("GENIE_TESTS_FIRST_SEED", "0"))
"""The first seed of the searches that `seeds` decorates. `make soak-tests` sets the variable to the time. The id of a failed test has
the seed: set the variable to this seed to repeat the test."""


def seeds(number: int, factor: int = FACTOR) -> pytest.MarkDecorator:
    """Run a test with `number` seeds as the argument `seed`; with `factor` times as many in the long run."""
    return pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + number * (factor if SOAK else 1)))


def examples(number: int, **more: int) -> settings:
    """Settings of Hypothesis for a search that tries `number` examples in `make test`."""
    return settings(max_examples=number * FACTOR if SOAK else number, **more)


def load_profile() -> None:
    """The settings of every search that says nothing else.

    No deadline for a single example: how long one takes depends on the machine.
    """
    settings.register_profile("short", deadline=None, derandomize=True, max_examples=40)
    settings.register_profile("soak", deadline=None, print_blob=True, max_examples=40 * FACTOR)
    settings.load_profile("soak" if SOAK else "short")
