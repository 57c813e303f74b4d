"""Who judges a history: each looks for one kind of wrong, and shares no code with what it judges."""

from __future__ import annotations

from genie.testing.simulation.checkers.durability import Lasting
from genie.testing.simulation.checkers.model import Facts
from genie.testing.simulation.checkers.mutual_exclusion import Holds, Turns
from genie.testing.simulation.checkers.notifications import Answers, Words
from genie.testing.simulation.history import History


def judge(history: History) -> list[str]:
    """What is wrong with a history, in the order in which it went wrong. Nothing, if all is well."""
    found = Lasting(history)
    facts = Facts(found.tainted, found.forsaken)
    facts.wrong += found.wrong
    judges = [Holds(facts), Words(facts), Answers(facts), Turns(facts)]
    for entry in found.entries:
        facts.now = entry.at
        for one in judges:
            one.before(entry)
        facts.see(entry)
        for one in judges:
            one.after(entry)
    for one in judges:
        one.finish()
    return [f"at {at:.6f}: {text}" for at, text in sorted(facts.wrong, key=lambda wrong: wrong[0])]
