"""The two rules by which namespaces balancer, in a small world of nodes that see who leads and know nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.storage.redis.election import DELAY_PER_NAMESPACE_S, MAX_DELAY_S, LeadershipBalancer

WISH_LASTS = 3
"""Rounds: a wish is looked at once a second, and lasts for three."""


@dataclass
class World:
    """Nodes that come and die, and namespaces that each of them serves. A round is one second."""

    nodes: dict[str, LeadershipBalancer] = field(default_factory=dict)
    leaders: dict[str, str | None] = field(default_factory=dict)
    wishes: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Who, how many it led then, and until which round it lasts."""
    now: int = 0
    moves: int = 0

    def node(self, name: str) -> None:
        self.nodes[name] = balancer = LeadershipBalancer()
        for namespace, leader in self.leaders.items():
            balancer.set_leader(namespace, leader)

    def die(self, name: str) -> None:
        del self.nodes[name]
        for namespace, leader in self.leaders.items():
            if leader == name:
                self.led(namespace, None)

    def led(self, namespace: str, leader: str | None, giver: str = "") -> None:
        """Everybody hears of it, only who gave it away not before the next round: it hesitates before it looks again."""
        self.leaders[namespace] = leader
        for name, balancer in self.nodes.items():
            if name != giver or leader == giver:
                balancer.set_leader(namespace, leader)

    def take_over(self, namespace: str, giver: str = "") -> None:
        """The fastest takes it. Of those who are equally fast the one that helps least: who has given it."""
        first = min(self.nodes, key=lambda name: (self.election_delay(name, namespace), name != giver))
        self.led(namespace, first, giver)
        self.moves += 1

    def election_delay(self, name: str, namespace: str) -> float:
        return self.nodes[name].election_delay_s(name, namespace)

    def wish(self) -> bool:
        said = {name: balancer.namespace_to_request(name) for name, balancer in self.nodes.items()}
        for name, namespace in said.items():
            if namespace is not None:
                assert self.leaders[namespace] != name
                self.wishes[namespace] = name, self.nodes[name].count(name), self.now + WISH_LASTS
        return any(said.values())

    def look(self) -> None:
        """All leaders look for wishes in the same moment, and again before anybody leads what they have given away."""
        given = self.give()
        self.wish()
        given |= self.give()
        for namespace, giver in given.items():
            self.take_over(namespace, giver)

    def give(self) -> dict[str, str]:
        """By namespace who has given it away."""
        given = {}
        for namespace, leader in self.leaders.items():
            who, count, lasts = self.wishes.get(namespace, ("", 0, -1))
            if (
                leader is not None
                and lasts >= self.now
                and self.nodes[leader].start_transfer(namespace, leader, who, count)
            ):
                given[namespace] = leader
        for namespace in given:
            self.led(namespace, None)
        return given

    def round(self) -> bool:
        """Whether somebody wished for anything."""
        self.now += 1
        for namespace, leader in self.leaders.items():
            self.led(namespace, leader)
        wished = self.wish()
        self.look()
        return wished

    def counts(self) -> list[int]:
        counts = Counter(self.leaders.values())
        return [counts[name] for name in self.nodes]

    def rest(self) -> None:
        """Go on until nobody wishes for anything, and those wishes have ended that there were."""
        bound = 4 * (len(self.leaders) + WISH_LASTS)
        quiet = 0
        while quiet <= WISH_LASTS:
            quiet = 0 if self.round() else quiet + 1
            assert self.now < bound, (self.counts(), self.leaders)


def world(nodes: int, owners: list[int]) -> World:
    """Nodes with names, and for each namespace the number of the node that leads it."""
    made = World(leaders={f"ns{i}": f"node{owner % nodes}" for i, owner in enumerate(owners)})
    for i in range(nodes):
        made.node(f"node{i}")
    return made


OWNERS = st.lists(st.integers(0, 4), min_size=1, max_size=24)


@given(nodes=st.integers(1, 5), owners=OWNERS)
def test_leadership_is_balanced_from_any_start_to_a_difference_of_one(nodes: int, owners: list[int]) -> None:
    made = world(nodes, owners)
    made.rest()
    assert max(made.counts()) - min(made.counts()) <= 1
    assert made.moves <= len(owners), "nothing moves twice"


@given(owners=OWNERS)
def test_two_nodes_transfer_only_the_difference(owners: list[int]) -> None:
    made = world(2, owners)
    one, other = made.counts()
    made.rest()
    assert made.moves == abs(one - other) // 2


@given(nodes=st.integers(1, 4), owners=OWNERS, events=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=8))
def test_balancing_survives_nodes_that_start_and_crash(
    nodes: int, owners: list[int], events: list[tuple[bool, int]]
) -> None:
    made = world(nodes, owners)
    for number, (comes, which) in enumerate(events):
        if comes or len(made.nodes) == 1:
            made.node(f"late{number}")
        else:
            made.die(sorted(made.nodes)[which % len(made.nodes)])
            for namespace in [namespace for namespace, leader in made.leaders.items() if leader is None]:
                made.take_over(namespace)
        made.round()
    made.now = 0
    made.wishes.clear()
    made.rest()
    assert max(made.counts()) - min(made.counts()) <= 1


def test_the_election_delay_grows_with_the_namespaces_led() -> None:
    made = world(3, [0, 0, 1, 2, 2, 2])
    made.led("new", None)
    assert (
        made.election_delay("node1", "new") < made.election_delay("node0", "new") < made.election_delay("node2", "new")
    )
    idle = LeadershipBalancer()
    assert idle.election_delay_s("idle", "new") == 0, "who leads nothing need not wait"


def test_the_election_delay_is_bounded() -> None:
    made = world(2, [0] * 1_000 + [1] * 900)
    assert made.election_delay("node1", "new") == MAX_DELAY_S
    assert made.election_delay("node0", "new") == 2 * MAX_DELAY_S


@pytest.mark.parametrize("least", [0, 1, 5, 30])
def test_the_node_that_leads_fewest_is_fastest_at_any_count(least: int) -> None:
    made = world(4, [0] * least + [1] * (least + 1) + [2] * (least + 2) + [3] * (least + 9))
    delays = [made.election_delay(f"node{i}", "new") for i in range(4)]
    assert sorted(delays) == delays
    assert delays[1] - delays[0] >= DELAY_PER_NAMESPACE_S - 1e-9


@pytest.mark.parametrize("own", [2, 8, 9, 30])
def test_a_transferred_namespace_has_a_longer_election_delay(own: int) -> None:
    made = world(2, [0] * own + [1] * (own - 2))
    balancer = made.nodes["node0"]
    assert balancer.start_transfer("ns0", "node0", "node1", own - 2)
    assert made.election_delay("node0", "ns0") > 2 * MAX_DELAY_S, "however many both lead"
    balancer.set_leader("ns0", None)
    assert made.election_delay("node0", "ns0") > 2 * MAX_DELAY_S
    balancer.set_leader("ns0", "node1")
    balancer.set_leader("ns0", None)
    assert made.election_delay("node0", "ns0") <= 2 * MAX_DELAY_S, "another has led it since"


def test_only_the_excess_is_transferred() -> None:
    made = world(5, [0, 0, 0, 1, 2, 3, 4])
    balancer = made.nodes["node0"]
    given = [balancer.start_transfer(f"ns{i}", "node0", f"node{i + 1}", 1) for i in range(3)]
    assert given == [True, False, False], "what is about to go does not count any more"


def test_a_receiver_gets_no_second_namespace_before_it_leads_the_first() -> None:
    balancer = world(2, [0, 0, 0]).nodes["node0"]
    assert balancer.start_transfer("ns0", "node0", "node1", 0)
    assert not balancer.start_transfer("ns1", "node0", "node1", 0)
    balancer.set_leader("ns0", "node0")  # it was not taken
    assert balancer.start_transfer("ns1", "node0", "node1", 0)


def test_an_old_transfer_request_is_compared_with_the_current_count() -> None:
    balancer = world(2, [0, 0, 0, 1, 1]).nodes["node0"]
    assert not balancer.start_transfer("ns0", "node0", "node1", 0)


def test_no_transfer_to_itself_or_one_that_only_swaps_roles() -> None:
    balancer = world(2, [0, 0, 0]).nodes["node0"]
    assert not balancer.start_transfer("ns0", "node0", "node0", 0)
    assert not balancer.start_transfer("ns0", "node0", "node1", 2)
    assert balancer.start_transfer("ns0", "node0", "node1", 1)


def test_each_node_requests_another_namespace() -> None:
    made = world(3, [0] * 30)
    assert made.nodes["node0"].namespace_to_request("node0") is None
    assert len({made.nodes[name].namespace_to_request(name) for name in ("node1", "node2")}) == 2
    assert made.nodes["node1"].namespace_to_request("node1") == made.nodes["node1"].namespace_to_request("node1"), (
        "the same as long as nothing moves"
    )
