"""How the namespaces spread over the nodes that are up, without anybody who decides it.

Each node sees who leads the namespaces that it serves itself, and goes by two rules. When a namespace has no leader, it
takes it over the later the more it leads already. When some node leads two more than itself, it leaves a wish for one of
those, and the leader, who looks for wishes now and then, hands it over. So nodes that serve the same namespaces come to
differ by one at most, and then nothing moves any more.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

HESITATION_S = 0.1
"""How much later a node takes over for each namespace that it leads, and again for each more than another leads."""
LONGEST_S = 0.5
"""The most of both: so all nodes may lead many, and who leads fewest needs no longer than this."""
GIVEN_S = 1.0
"""How much later a node takes one over that it has just given away: else who leads many would often be faster again."""
TOO_MANY = 2
"""By how many more a node must lead than another before it hands one over: moving the last would only turn it round."""


class Spread:
    """Who leads what, by address, of the namespaces that this node serves."""

    def __init__(self) -> None:
        self._leaders: dict[str, str] = {}
        self._given: dict[str, str] = {}
        """What this node has handed over, and to whom, until it hears who leads it."""

    def leads(self, namespace: str, address: str | None) -> None:
        """Who is known to lead it now; None: nobody is."""
        if address is None:
            self._leaders.pop(namespace, None)
        else:
            self._leaders[namespace] = address
            self._given.pop(namespace, None)

    def count(self, address: str) -> int:
        """How many it leads."""
        return sum(leader == address for leader in self._leaders.values())

    def hesitation_s(self, own: str, namespace: str) -> float:
        """How long this node should leave a namespace that nobody leads to nodes that lead fewer."""
        count = self.count(own)
        more = count - min(Counter(self._leaders.values()).values(), default=0)
        hesitation_s = min(HESITATION_S * count, LONGEST_S) + (min(HESITATION_S * more, LONGEST_S) if count else 0)
        return hesitation_s + (GIVEN_S if namespace in self._given else 0)

    def give(self, namespace: str, own: str, other: str, count: int) -> bool:
        """Whether this node should hand a namespace over to another that led so many when it asked.

        If so it counts as gone, and as the other's: who asks again before it leads the first gets no second.
        """
        given = sum(receiver == other for receiver in self._given.values())
        if other == own or self.count(own) - max(count, self.count(other) + given) < TOO_MANY:
            return False
        self.leads(namespace, None)
        self._given[namespace] = other
        return True

    def wish(self, own: str) -> str | None:
        """The namespace that this node should ask for, if any: one at a time, and of several nodes each another."""
        counts = Counter(self._leaders.values())
        most, leads = max(
            ((address, count) for address, count in counts.items()), key=lambda it: it[1], default=("", 0)
        )
        if leads - counts[own] < TOO_MANY:
            return None
        its = [namespace for namespace, leader in self._leaders.items() if leader == most]
        return min(its, key=lambda namespace: blake2b(f"{own} {namespace}".encode()).digest())
