"""The check of durability: which losses of a stored state it excuses, and which it reports."""

from __future__ import annotations

from math import inf
from random import Random

from genie.testing.simulation.history import SERVER_SENT
from genie.testing.simulation.host import Host
from genie.testing.simulation.network import Network
from simulator.checkers.durability import LEASE_S, RESTORE_S, SurvivingLineage
from simulator.history import STORE, Change, ClusterHistory, StoreState
from simulator.scenario import FIRST_CRASH_SEED
from simulator.soak import run
from simulator.stores import OneRedis

LOST_AT = 10.0
"""When s1.1 stored the batch that Redis loses, and sent a message about it."""
TAKEOVER_AT = 20.0
"""When a server took over at the Redis that had lost the batch."""


class Scenario:
    """The history of a Redis that lost a batch. s1.1 had sent a message that depends on the batch."""

    def __init__(self) -> None:
        self.now = 0.0
        self.history = ClusterHistory(lambda: self.now)
        self.history.lifetimes = {"s1.1": (0.0, inf), "s2.1": (0.0, inf), "s3.1": (0.0, inf)}
        self._stored_count = 0
        self.kept = self.store(5.0, "s1.1", (1, 1), None)
        self.lost = self.store(LOST_AT, "s1.1", (1, 2), self.kept)
        self.history.append(SERVER_SENT, "s1.1", {"command": "locked", "payload": {"id": 7}}, 1)
        self.head = self.kept

    def store(
        self,
        at: float,
        writer: str,
        position: tuple[int, int],
        parent: StoreState | None,
        *,
        replaced: StoreState | None = None,
        known: StoreState | None = None,
    ) -> StoreState:
        """Store a state, and make it the final one. It is a batch, a takeover, or with `replaced` a snapshot."""
        self.now = at
        self._stored_count += 1
        state = StoreState(
            number=self._stored_count,
            at=at,
            writer=writer,
            host="redis",
            position=position,
            state_key=b"state",
            parent=parent,
            replaced=replaced or parent,
            known_to_writer=known,
            is_snapshot=replaced is not None,
            records={},
            acknowledged_at=at,
        )
        self.history.append(STORE, writer, Change({}, {}, position[0], (position[1], 0.0, 1, 1), state=state))
        self.head = self.history.final = state
        return state

    def take_over(self, at: float, writer: str, epoch: int, known: StoreState | None = None) -> None:
        self.store(at, writer, (epoch, 0), self.head, known=known)

    def commit(self, at: float, writer: str, epoch: int) -> None:
        self.store(at, writer, (epoch, 1), self.head)

    def end(self, at: float, process: str) -> None:
        started_at, _ = self.history.lifetimes[process]
        self.history.lifetimes[process] = started_at, at
        self.impair(process.partition(".")[0], at, at)

    def impair(self, host: str, begin: float, end: float) -> None:
        """Record a host as impaired ten times per second."""
        count = round((end - begin) * 10)
        self.history.impaired.setdefault(host, []).extend(begin + number / 10 for number in range(count + 1))

    def is_excused(self) -> bool:
        """Return whether the loss is excused. Fails if the check finds another violation."""
        found = [text for _, text in SurvivingLineage(self.history).violations]
        losses = [text for text in found if "though the host was not impaired" in text]
        assert found == losses
        return not losses


def test_a_restored_batch_is_not_lost() -> None:
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s1.1", 2, known=scenario.lost)
    scenario.store(TAKEOVER_AT + 0.1, "s1.1", (3, 0), scenario.lost, replaced=scenario.head, known=scenario.lost)
    assert scenario.is_excused()


def test_a_loss_is_reported_if_another_server_takes_over_from_an_unimpaired_one() -> None:
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s2.1", 2)
    scenario.commit(TAKEOVER_AT + 0.1, "s2.1", 2)
    assert not scenario.is_excused()


def test_a_loss_is_excused_if_the_sender_ended_before_another_server_took_over() -> None:
    scenario = Scenario()
    scenario.end(TAKEOVER_AT - LEASE_S, "s1.1")
    scenario.take_over(TAKEOVER_AT, "s2.1", 2)
    scenario.commit(TAKEOVER_AT + 0.1, "s2.1", 2)
    assert scenario.is_excused()


def test_a_loss_is_excused_if_the_sender_took_over_and_ended_before_it_restored() -> None:
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s1.1", 2, known=scenario.kept)  # it had the reply to its previous batch only
    scenario.end(TAKEOVER_AT + 0.002, "s1.1")
    scenario.take_over(TAKEOVER_AT + 5, "s2.1", 3)
    scenario.commit(TAKEOVER_AT + 5.1, "s2.1", 3)
    assert scenario.is_excused()


def test_a_loss_is_excused_if_a_follower_that_knew_the_batch_ended_before_it_restored() -> None:
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s2.1", 2, known=scenario.lost)
    scenario.end(TAKEOVER_AT + 0.001, "s1.1")  # otherwise it would still restore the batch
    scenario.end(TAKEOVER_AT + 0.002, "s2.1")
    scenario.take_over(TAKEOVER_AT + 5, "s3.1", 3)
    scenario.commit(TAKEOVER_AT + 5.1, "s3.1", 3)
    assert scenario.is_excused()


def test_a_loss_is_excused_if_redis_failed_until_the_server_that_had_taken_over_ended() -> None:
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s1.1", 2, known=scenario.lost)
    scenario.impair("redis", TAKEOVER_AT + 0.1, TAKEOVER_AT + 8)
    scenario.end(TAKEOVER_AT + 8.1, "s1.1")
    scenario.take_over(TAKEOVER_AT + 20, "s2.1", 3)
    scenario.commit(TAKEOVER_AT + 20.1, "s2.1", 3)
    assert scenario.is_excused()


def test_a_loss_is_reported_if_the_sender_took_over_and_did_not_restore_in_time() -> None:
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s1.1", 2, known=scenario.lost)
    scenario.end(TAKEOVER_AT + RESTORE_S + 0.1, "s1.1")
    scenario.take_over(TAKEOVER_AT + 5, "s2.1", 3)
    scenario.commit(TAKEOVER_AT + 5.1, "s2.1", 3)
    assert not scenario.is_excused()


def test_a_loss_is_reported_if_the_sender_took_over_and_committed_without_restoring() -> None:
    """Even if it was impaired before this commit, and ended at once. `known` is None, because another check uses it."""
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s1.1", 2)
    scenario.impair("s1", TAKEOVER_AT + 0.1, TAKEOVER_AT + 0.3)
    scenario.commit(TAKEOVER_AT + 0.4, "s1.1", 2)
    scenario.end(TAKEOVER_AT + 0.5, "s1.1")
    scenario.take_over(TAKEOVER_AT + 5, "s2.1", 3)
    scenario.commit(TAKEOVER_AT + 5.1, "s2.1", 3)
    assert not scenario.is_excused()


def test_a_loss_is_reported_if_no_other_server_took_over_after_the_sender() -> None:
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s1.1", 2, known=scenario.lost)
    scenario.end(TAKEOVER_AT + 0.002, "s1.1")
    assert not scenario.is_excused()


def test_a_loss_is_reported_if_the_server_that_took_over_did_not_know_the_batch() -> None:
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s2.1", 2, known=scenario.kept)
    scenario.end(TAKEOVER_AT + 0.002, "s2.1")
    scenario.end(TAKEOVER_AT + 0.003, "s1.1")
    scenario.take_over(TAKEOVER_AT + 5, "s3.1", 3)
    scenario.commit(TAKEOVER_AT + 5.1, "s3.1", 3)
    assert not scenario.is_excused()


def test_a_later_impairment_of_the_sender_does_not_excuse_an_abandoned_takeover() -> None:
    """The sender was well when the server that had taken over ended. So it should have taken over and restored the batch."""
    scenario = Scenario()
    scenario.take_over(TAKEOVER_AT, "s2.1", 2, known=scenario.lost)
    scenario.end(TAKEOVER_AT + 0.5, "s2.1")
    scenario.impair("s1", TAKEOVER_AT + 10, TAKEOVER_AT + 11)
    scenario.take_over(TAKEOVER_AT + 20, "s3.1", 3)
    scenario.commit(TAKEOVER_AT + 20.1, "s3.1", 3)
    assert not scenario.is_excused()


def test_a_server_that_ends_after_sigterm_is_recorded_as_impaired(network: Network) -> None:
    """At its end, because it may be restarted before the next regular record."""
    loop = network.loop
    history = ClusterHistory(loop.time)
    store = OneRedis(loop, history)
    loop.run_until_complete(store.start())
    host = Host("s1", loop, history, random=Random(1), redis_url=store.url, min_replicas=0)
    loop.call_later(5, host.terminate)
    loop.call_later(10, loop.stop)
    loop.run_forever()
    assert history.impaired["s1"] == [history.lifetimes["s1.1"][1]]


def test_a_redis_that_crashed_is_recorded_as_impaired() -> None:
    cluster, _ = run(FIRST_CRASH_SEED)
    crashes = [entry.at for entry in cluster.history.entries if "crash the store" in str(entry.data)]
    assert crashes
    assert min(cluster.history.impaired["redis"]) > crashes[0]
