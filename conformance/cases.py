"""Reads the cases, and selects the ones to run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "cases"
FIELDS: Final = {"name", "rule", "section", "text", "needs", "servers", "down", "slow", "steps"}
"""The fields of a case, so that a misspelled one is found."""


class CaseError(Exception):
    """A case is written wrongly. This is a mistake in the kit, not in the client or server under test."""


@dataclass(frozen=True)
class Case:
    """One case: steps that are executed in order, and what they test."""

    name: str
    source: str
    """Rule number ("rule 5") or section ("section release") of protocol.md."""
    text: str
    """What the rule or section states, in short."""
    steps: Sequence[dict[str, Any]]
    needs: frozenset[str] = frozenset()
    """The capabilities without which the case is skipped."""
    servers: int = 1
    """How many scripted servers the case has."""
    down: frozenset[int] = frozenset()
    """The scripted servers that refuse connections at first."""
    slow: bool = False
    """True if the case waits for seconds, so that it is started first."""


def load(direction: str) -> list[Case]:
    """Return all cases for "client" or "server", the longest first.

    Raises CaseError for a case with an unknown field or a name that occurs twice.
    """
    cases = [case for path in sorted((FOLDER / direction).glob("*.json")) for case in _read(path)]
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise CaseError(
            f"{direction}: two cases have the same name: {sorted({n for n in names if names.count(n) > 1})}"
        )
    return sorted(cases, key=lambda case: not case.slow)


def _read(path: Path) -> Iterator[Case]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CaseError(f"{path}: {error}") from None
    for row in rows:
        unknown = set(row) - FIELDS
        if unknown:
            raise CaseError(f"{path}: the case {row.get('name')} has unknown fields: {sorted(unknown)}")
        yield Case(
            name=row["name"],
            source=f"rule {row['rule']}" if "rule" in row else f"section {row['section']}",
            text=row["text"],
            steps=row["steps"],
            needs=frozenset(row.get("needs", ())),
            servers=row.get("servers", 1),
            down=frozenset(row.get("down", ())),
            slow=row.get("slow", False),
        )


def select(cases: Sequence[Case], filters: Sequence[str]) -> list[Case]:
    """Return the cases that any filter selects; all without filters."""
    return [case for case in cases if not filters or any(_is_selected(case, text.lower()) for text in filters)]


def _is_selected(case: Case, text: str) -> bool:
    """Return whether the text is the case's rule number, its section, or a part of its name."""
    source = case.source.lower().partition(" ")[2]
    return text == source or (not text.isdigit() and text in case.name)
