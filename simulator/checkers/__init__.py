"""Checkers of a recorded history. Each checker finds one kind of violation, without using code of the server or library."""

from __future__ import annotations

from simulator.checkers.belief import BeliefChecker
from simulator.checkers.durability import SurvivingLineage
from simulator.checkers.model import Model
from simulator.checkers.mutual_exclusion import FairnessChecker, LockChecker
from simulator.checkers.notifications import NotificationChecker, ReplyChecker
from simulator.history import ClusterHistory


def check(history: ClusterHistory) -> list[str]:
    """Return a description of each violation in a history, ordered by time."""
    lineage = SurvivingLineage(history)
    model = Model(lineage.diverged, lineage.diverged_connections)
    model.violations += lineage.violations + history.violations
    checkers = [
        LockChecker(model),
        NotificationChecker(model),
        ReplyChecker(model),
        FairnessChecker(model),
        BeliefChecker(model),
    ]
    for entry in lineage.entries:
        model.now = entry.at
        for checker in checkers:
            checker.before(entry)
        model.apply(entry)
        for checker in checkers:
            checker.after(entry)
    for checker in checkers:
        checker.finish()
    return [f"at {at:.6f}: {text}" for at, text in sorted(model.violations, key=lambda violation: violation[0])]
