"""Results of cases, for people and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from conformance.cases import Case


class Failure(Exception):
    """The client or server under test did not do what a case expects."""


@dataclass(frozen=True)
class Result:
    """The result of one case."""

    case: Case
    outcome: str
    """`passed`, `failed` or `skipped`."""
    reason: str = ""
    """Why the case failed or was skipped."""
    seconds: float = 0.0
    transcript: Sequence[str] = field(default=())
    """What was sent and received, for a failed case."""

    def as_json(self) -> dict[str, object]:
        """Return the result for `--json`."""
        row = {
            "name": self.case.name,
            "source": self.case.source,
            "text": self.case.text,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
        }
        return (
            row
            | ({"reason": self.reason} if self.reason else {})
            | ({"transcript": list(self.transcript)} if self.transcript else {})
        )


MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}


def print_result(result: Result) -> None:
    """Print a line for a result; for a failure, also the statement that was tested and the transcript."""
    line = f"{MARKS[result.outcome]} {result.case.source:<22} {result.case.name}"
    print(line if result.outcome == "passed" else f"{line}: {result.reason}", flush=True)
    if result.outcome == "failed":
        print(f"       protocol.md: {result.case.text}")
        for entry in result.transcript:
            print(f"       {entry}")
        sys.stdout.flush()


def print_summary(results: Sequence[Result], *, as_json: bool) -> None:
    """Print the number of results of each kind, or all results as one JSON object."""
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in MARKS}
    if as_json:
        print(json.dumps(counts | {"cases": [result.as_json() for result in results]}, indent=1))
    else:
        print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
