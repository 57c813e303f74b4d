"""Reject the project's former private vocabulary: docs/glossary.md has the terms to use instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORDS = (
    # programs are not people
    r"somebody",
    r"nobody",
    r"strangers?",
    r"told",
    r"hears?",
    r"heard",
    r"hesitat\w+",
    r"whoever",
    r"wishe[sd]",
    r"(?:im)?patien(?:ce|t)",
    r"bad days?",
    r"com(?:e|es|ing) first",
    r"go(?:es|ing)? on\b(?! (?:a|an|the|to) )",
    r"last word",
    r"who leads",
    # a pronoun in place of its noun
    r"those\s+that",
    # calques
    r"anew",
    r"by now",
    r"so many",
    r"no more(?! than)",
    r"for its sake",
    r"as far as is known",
    r"at present",
    r"dearer",
    r"(?<![.`\"'])behind(?!\w|`|\"|'|:|=| the (?:proxy|load balancer))",
    # terms that have a standard name
    r"who waits for whom",
    r"longest lines?",
    r"places? in (?:the|a|its) line",
    r"tenures?",
    r"hang(?:s|ing)? up",
)
NAMES = (
    "Asker",
    "ByAmount",
    "Conversation",
    "Errand",
    "Greeting",
    "Knowledge",
    "Lingering",
    "Outlet",
    "Precedence",
    "Refusing",
    "Seat",
    "Superseded",
    "Telling",
    "Tenure",
    r"Turns(?=\()",
    "Wishes",
    "Witness",
    "again_and_again",
    "ask_anew",
    "carry_out",
    "hesitates",
    "impatient",
    "newcomers",
    "outdone",
    "outlived",
    "respect_s",
    "send_away",
    "snubbed",
    "somebody_waits",
    "take_up",
    "write_anew",
    r"MOST(?:_[A-Z]+)*",
    r"LEAST(?:_[A-Z]+)*",
)
RETIRED = re.compile(rf"(?i:\b(?:{'|'.join(WORDS)})\b)|\b_?(?:{'|'.join(NAMES)})\b")
SUFFIXES = {".py", ".md", ".lua", ".html", ".js", ".css"}
DEFINITION = re.compile(r"^\s*(?:async def|def|class) (\w+)|^(\w+) *(?::[^=]*)?= ", re.MULTILINE)


def is_test(path: Path) -> bool:
    """Return whether a path is in the tests or the benchmarks of an application."""
    folder, *parts = path.relative_to(ROOT).parts
    return folder == "applications" and not {"tests", "benchmarks"}.isdisjoint(parts)


def texts() -> Iterator[tuple[str, str]]:
    """Paths with their text; of tests only the names of files, classes, functions and module variables."""
    places = [ROOT / name for name in ("README.md", "CHANGELOG.md", "protocol.md")]
    for folder in ("genie", "docs", "examples", "applications", "simulator"):
        places += [path for path in sorted((ROOT / folder).rglob("*")) if not is_test(path)]
    for path in places:
        if path.suffix in SUFFIXES and path.is_file():
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "applications").glob("*/tests/**/*.py")]):
        if path.name != Path(__file__).name:
            names = [
                path.stem,
                *(found[1] or found[2] for found in DEFINITION.finditer(path.read_text(encoding="utf-8"))),
            ]
            yield path.relative_to(ROOT).as_posix(), "\n".join(f"{name} {name.replace('_', ' ')}" for name in names)


TEXTS = dict(texts())


@pytest.mark.parametrize("path", TEXTS)
def test_no_file_contains_retired_words(path: str) -> None:
    found = [
        f"line {TEXTS[path].count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for match in RETIRED.finditer(TEXTS[path])
    ]
    assert not found, f"{path} contains retired words: {found[:20]}; docs/glossary.md has the terms to use"


@pytest.mark.parametrize(
    "text",
    [
        "Nobody waits.",
        "it goes on",
        "written anew",
        "class Seat:",
        "MOST_EVENTS",
        "run behind it",
        "those\n    that wait",
    ],
)
def test_retired_words_are_found(text: str) -> None:
    assert RETIRED.search(text)


@pytest.mark.parametrize(
    "text", ["no more than ten", "run.behind", "behind=False", "it depends on the lease", "almost", "seats"]
)
def test_other_words_are_not(text: str) -> None:
    assert not RETIRED.search(text)
