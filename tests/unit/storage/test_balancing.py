"""Leadership balancing, with a model of several nodes: it converges, and transfers no more than necessary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.storage.redis.election import DELAY_PER_NAMESPACE_S, MAX_DELAY_S, LeadershipBalancer

REQUEST_ROUNDS = 3
"""How many rounds a transfer request is valid. Leaders read requests once per round."""


@dataclass
class Cluster:
    """A model of nodes that start and crash and all serve the same namespaces. A round is one second."""

    nodes: dict[str, LeadershipBalancer] = field(default_factory=dict)
    leaders: dict[str, str | None] = field(default_factory=dict)
    requests: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """By namespace: the requesting node, how many namespaces it led then, and the last round of the request."""
    now: int = 0
    moves: int = 0

    def start(self, name: str) -> None:
        self.nodes[name] = balancer = LeadershipBalancer()
        for namespace, leader in self.leaders.items():
            balancer.set_leader(namespace, leader)

    def crash(self, name: str) -> None:
        del self.nodes[name]
        for namespace, leader in self.leaders.items():
            if leader == name:
                self.set_leader(namespace, None)

    def set_leader(self, namespace: str, leader: str | None, former: str = "") -> None:
        """Tell all nodes who leads; the former leader, which waits before it competes again, only in the next round."""
        self.leaders[namespace] = leader
        for name, balancer in self.nodes.items():
            if name != former or leader == former:
                balancer.set_leader(namespace, leader)

    def elect(self, namespace: str, former: str = "") -> None:
        """Elect the node with the shortest election delay; among equals the former leader, which is the worst case."""
        winner = min(self.nodes, key=lambda name: (self.election_delay(name, namespace), name != former))
        self.set_leader(namespace, winner, former)
        self.moves += 1

    def election_delay(self, name: str, namespace: str) -> float:
        return self.nodes[name].election_delay_s(name, namespace)

    def send_requests(self) -> bool:
        """Let all nodes request transfers; return whether any does."""
        requested = {name: balancer.namespace_to_request(name) for name, balancer in self.nodes.items()}
        for name, namespace in requested.items():
            if namespace is not None:
                assert self.leaders[namespace] != name
                self.requests[namespace] = name, self.nodes[name].count(name), self.now + REQUEST_ROUNDS
        return any(requested.values())

    def transfer(self) -> None:
        """Let all leaders process requests at the same time, and again before the transferred namespaces are led."""
        transferred = self.start_transfers()
        self.send_requests()
        transferred |= self.start_transfers()
        for namespace, former in transferred.items():
            self.elect(namespace, former)

    def start_transfers(self) -> dict[str, str]:
        """Let leaders resign as requested; return the former leaders by namespace."""
        former_leaders = {}
        for namespace, leader in self.leaders.items():
            receiver, count, last_round = self.requests.get(namespace, ("", 0, -1))
            if (
                leader is not None
                and last_round >= self.now
                and self.nodes[leader].start_transfer(namespace, leader, receiver, count)
            ):
                former_leaders[namespace] = leader
        for namespace in former_leaders:
            self.set_leader(namespace, None)
        return former_leaders

    def run_round(self) -> bool:
        """Run one round; return whether any node requested a transfer."""
        self.now += 1
        for namespace, leader in self.leaders.items():
            self.set_leader(namespace, leader)
        requested = self.send_requests()
        self.transfer()
        return requested

    def counts(self) -> list[int]:
        counts = Counter(self.leaders.values())
        return [counts[name] for name in self.nodes]

    def run_until_balanced(self) -> None:
        """Run until no node requests a transfer, and all requests have expired."""
        bound = 4 * (len(self.leaders) + REQUEST_ROUNDS)
        quiet = 0
        while quiet <= REQUEST_ROUNDS:
            quiet = 0 if self.run_round() else quiet + 1
            assert self.now < bound, (self.counts(), self.leaders)


def cluster_of(nodes: int, owners: list[int]) -> Cluster:
    """Return a cluster of `node0`, `node1`, ...; `owners` has the number of the leader of each namespace `ns0`, ..."""
    cluster = Cluster(leaders={f"ns{i}": f"node{owner % nodes}" for i, owner in enumerate(owners)})
    for i in range(nodes):
        cluster.start(f"node{i}")
    return cluster


OWNERS = st.lists(st.integers(0, 4), min_size=1, max_size=24)


@given(nodes=st.integers(1, 5), owners=OWNERS)
def test_leadership_is_balanced_from_any_start_to_a_difference_of_one(nodes: int, owners: list[int]) -> None:
    cluster = cluster_of(nodes, owners)
    cluster.run_until_balanced()
    assert max(cluster.counts()) - min(cluster.counts()) <= 1
    assert cluster.moves <= len(owners), "no namespace is transferred twice"


@given(owners=OWNERS)
def test_two_nodes_transfer_only_the_difference(owners: list[int]) -> None:
    cluster = cluster_of(2, owners)
    one, other = cluster.counts()
    cluster.run_until_balanced()
    assert cluster.moves == abs(one - other) // 2


@given(nodes=st.integers(1, 4), owners=OWNERS, events=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=8))
def test_balancing_survives_nodes_that_start_and_crash(
    nodes: int, owners: list[int], events: list[tuple[bool, int]]
) -> None:
    cluster = cluster_of(nodes, owners)
    for number, (starts, index) in enumerate(events):
        if starts or len(cluster.nodes) == 1:
            cluster.start(f"late{number}")
        else:
            cluster.crash(sorted(cluster.nodes)[index % len(cluster.nodes)])
            for namespace in [namespace for namespace, leader in cluster.leaders.items() if leader is None]:
                cluster.elect(namespace)
        cluster.run_round()
    cluster.now = 0
    cluster.requests.clear()
    cluster.run_until_balanced()
    assert max(cluster.counts()) - min(cluster.counts()) <= 1


def test_the_election_delay_grows_with_the_namespaces_led() -> None:
    cluster = cluster_of(3, [0, 0, 1, 2, 2, 2])
    cluster.set_leader("new", None)
    assert (
        cluster.election_delay("node1", "new")
        < cluster.election_delay("node0", "new")
        < cluster.election_delay("node2", "new")
    )
    idle = LeadershipBalancer()
    assert idle.election_delay_s("idle", "new") == 0, "a node that leads nothing need not wait"


def test_the_election_delay_is_bounded() -> None:
    cluster = cluster_of(2, [0] * 1_000 + [1] * 900)
    assert cluster.election_delay("node1", "new") == MAX_DELAY_S
    assert cluster.election_delay("node0", "new") == 2 * MAX_DELAY_S


@pytest.mark.parametrize("min_count", [0, 1, 5, 30])
def test_the_node_that_leads_fewest_is_fastest_at_any_count(min_count: int) -> None:
    cluster = cluster_of(4, [0] * min_count + [1] * (min_count + 1) + [2] * (min_count + 2) + [3] * (min_count + 9))
    delays = [cluster.election_delay(f"node{i}", "new") for i in range(4)]
    assert sorted(delays) == delays
    assert delays[1] - delays[0] >= DELAY_PER_NAMESPACE_S - 1e-9


@pytest.mark.parametrize("own", [2, 8, 9, 30])
def test_a_transferred_namespace_has_a_longer_election_delay(own: int) -> None:
    cluster = cluster_of(2, [0] * own + [1] * (own - 2))
    balancer = cluster.nodes["node0"]
    assert balancer.start_transfer("ns0", "node0", "node1", own - 2)
    assert cluster.election_delay("node0", "ns0") > 2 * MAX_DELAY_S, "regardless of how many both lead"
    balancer.set_leader("ns0", None)
    assert cluster.election_delay("node0", "ns0") > 2 * MAX_DELAY_S
    balancer.set_leader("ns0", "node1")
    balancer.set_leader("ns0", None)
    assert cluster.election_delay("node0", "ns0") <= 2 * MAX_DELAY_S, "another node has led it since"


def test_only_the_excess_is_transferred() -> None:
    cluster = cluster_of(5, [0, 0, 0, 1, 2, 3, 4])
    balancer = cluster.nodes["node0"]
    started = [balancer.start_transfer(f"ns{i}", "node0", f"node{i + 1}", 1) for i in range(3)]
    assert started == [True, False, False], "a namespace that is being transferred does not count any more"


def test_a_receiver_gets_no_second_namespace_before_it_leads_the_first() -> None:
    balancer = cluster_of(2, [0, 0, 0]).nodes["node0"]
    assert balancer.start_transfer("ns0", "node0", "node1", 0)
    assert not balancer.start_transfer("ns1", "node0", "node1", 0)
    balancer.set_leader("ns0", "node0")  # the receiver did not take over
    assert balancer.start_transfer("ns1", "node0", "node1", 0)


def test_an_old_transfer_request_is_compared_with_the_current_count() -> None:
    balancer = cluster_of(2, [0, 0, 0, 1, 1]).nodes["node0"]
    assert not balancer.start_transfer("ns0", "node0", "node1", 0)


def test_no_transfer_to_itself_or_one_that_only_swaps_roles() -> None:
    balancer = cluster_of(2, [0, 0, 0]).nodes["node0"]
    assert not balancer.start_transfer("ns0", "node0", "node0", 0)
    assert not balancer.start_transfer("ns0", "node0", "node1", 2)
    assert balancer.start_transfer("ns0", "node0", "node1", 1)


def test_nodes_request_different_namespaces() -> None:
    cluster = cluster_of(3, [0] * 30)
    assert cluster.nodes["node0"].namespace_to_request("node0") is None
    assert len({cluster.nodes[name].namespace_to_request(name) for name in ("node1", "node2")}) == 2
    assert cluster.nodes["node1"].namespace_to_request("node1") == cluster.nodes["node1"].namespace_to_request(
        "node1"
    ), "the choice is stable"
