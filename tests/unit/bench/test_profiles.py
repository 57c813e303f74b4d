"""The load profiles of `genie bench --profile`: what is read from TOML, and what is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.bench import profiles
from genie.bench.profiles import BUILT_IN, Phase, load, parse


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_profiles_are_valid(name: str) -> None:
    assert load(name)


def test_keys_replace_defaults() -> None:
    assert parse("[[phase]]\nrate = 5\n[[phase]]\nname = 'last'\none_by_one = true") == [
        Phase(name="phase 1", rate=5),
        Phase(name="last", one_by_one=True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"needs 1 to 100 tables \[\[phase\]\]"),
        ("[[phase]]\n[other]", "unknown key 'other'"),
        ("[[phase]]\n[[phase]]\nrats = 5", "phase 2: unknown key 'rats'; known: name, seconds"),
        ("[[phase]]\nconnections = 1.5", "connections must be a whole number from 1 to 1000, not 1.5"),
        ("[[phase]]\nrate = -1", "rate must be a number from 0 to 100000, not -1"),
        ("[[phase]]\nseconds = nan", "seconds must be a number from 0.1 to 86400, not nan"),
        ("[[phase]]\nlocks = true", "locks must be a whole number from 1 to 100, not True"),
        ("[[phase]]\none_by_one = 1", "one_by_one must be true or false, not 1"),
        ("[[phase]]\nname = 1", "name must be a text, not 1"),
        ("[[phase]]\nresources = 2\nlocks = 3", r"locks must be at most resources \(2\), not 3"),
        ("[[phase", "end of document"),
    ],
)
def test_wrong_profiles_are_rejected(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load(str(path))
    assert str(error.value).startswith(f"{path}: ")


def test_a_missing_file_names_the_built_in_profiles() -> None:
    with pytest.raises(ValueError, match=r"No such file.*steady, burst, hot-key, saga"):
        load("stedy")


def test_a_transaction_has_distinct_resources_at_any_skew() -> None:
    phase = Phase(name="", resources=30, locks=30, skew=5)
    assert len(set(profiles._Load(phase, [])._choose())) == phase.locks
