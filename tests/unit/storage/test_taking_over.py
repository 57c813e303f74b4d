"""Who takes a namespace over asks last whether it has the master, and leaves time to whoever led by what Redis lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.election import LeadershipBalancer
from genie.storage.redis.follower import Follower
from genie.storage.redis.keyspace import Keyspace, LeaderEpoch, Meta
from genie.storage.redis.log import BatchCommitted, EpochHistory, EpochStarted, LogReader, Position
from genie.storage.redis.replica import LazyReplica, PriorLeadership, Snapshot
from genie.storage.store import Batch, Node, StateMachine

TENURE = LeaderEpoch(7, "nonce", "records")
OWN = Node(listening="here", address="own", lease_ms=3_000, boot="today", host="machine")
BEFORE = Node(listening="here", address="own", lease_ms=3_000, boot="today", host="machine")
"""This node, before it was started again."""
NEVER = 1_000_000


@dataclass
class Scripted:
    """A namespace that says what it is told to, and whose master is another one behind so many looks."""

    meta: Meta | None
    master_for: int = NEVER
    name: str = "a"
    replaceable: bool = True
    looks: int = 0
    found: bool = True
    furthest: Position = (0, 0)
    done: list[str] = field(default_factory=list)
    history: EpochHistory | None = None
    """By what it has come about that whoever takes it over finds there; None: somebody else is always faster."""
    tenure: LeaderEpoch = TENURE

    async def read(self) -> Meta | None:
        self.looks += 1
        return self.meta

    async def wait(self) -> bool:
        return False

    async def outdone(self, position: Position) -> bool:
        return self.furthest > position

    async def findable(self) -> bool:
        return self.found

    async def wish(self, *_: Any) -> None:
        self.done.append("wished for")

    async def verify(self) -> None:
        if self.looks >= self.master_for:
            raise RedisFailure("there is another master")

    async def take_over(self, *_: Any, **__: Any) -> Position | None:
        self.done.append("taken over")
        return None if self.history is None else self.history.position

    async def write_anew(self, *_: Any) -> None:
        self.done.append("written anew")

    async def load(self) -> AsyncIterator[dict[bytes, bytes]]:
        self.done.append("loaded")
        yield {}


def led_by(node: Node | None, epoch: int = 7, number: int = 3) -> Meta:
    return Meta(LeaderEpoch(epoch, "nonce", "records"), node, number, Batch(), ((0, 0),))


def follower_of(
    namespace: Scripted, *, balancer: LeadershipBalancer | None = None, led: PriorLeadership | None = None
) -> Follower:
    """One that knew a leader at this Redis, and has not heard of it for longer than any lease."""
    made = newcomer_to(namespace, balancer=balancer, led=led)
    made._precedence.newcomer = False
    return made


def newcomer_to(
    namespace: Scripted, *, balancer: LeadershipBalancer | None = None, led: PriorLeadership | None = None
) -> Follower:
    """One that has heard of nobody, for as long."""
    journal = LogReader(cast("Any", None), "journal")
    if namespace.meta is not None:
        journal.start(namespace.meta.history)
    made = Follower(cast("Keyspace", namespace), journal, OWN, balancer or LeadershipBalancer(), lambda _: None, led)
    made._precedence._heard_at -= 3600
    made._precedence._nobody_since = made._precedence._heard_at
    return made


async def test_the_master_is_looked_for_behind_the_hesitation(monkeypatch: pytest.MonkeyPatch) -> None:
    balancer, namespace = LeadershipBalancer(), Scripted(led_by(Node(address="gone")), master_for=2)
    balancer.leads("b", "own")
    monkeypatch.setattr("genie.storage.redis.election.HESITATION_S", 0.001)
    with pytest.raises(RedisFailure):
        await follower_of(namespace, balancer=balancer)._lapsed(TENURE, "gone")
    assert namespace.looks == 2
    assert not namespace.done


@pytest.mark.parametrize("meta", [led_by(None), led_by(BEFORE)])
async def test_who_need_not_wait_takes_over_from_the_master_alone(meta: Meta) -> None:
    namespace = Scripted(meta, master_for=0)
    with pytest.raises(RedisFailure):
        await follower_of(namespace)._follow(meta)
    assert not namespace.done


@pytest.mark.parametrize("led", [None, PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 1))), Batch()), (7, 1))])
async def test_nobody_leads_where_nothing_is_before_it_is_known_to_be_the_master(led: PriorLeadership | None) -> None:
    namespace = Scripted(None, master_for=0)
    with pytest.raises(RedisFailure):
        await follower_of(namespace, led=led)._nobody()
    assert not namespace.done
    namespace.master_for = NEVER
    await follower_of(namespace, led=led)._nobody()
    assert namespace.done == ["taken over" if led is None else "written anew"]


@pytest.mark.parametrize("node", [None, BEFORE])
@pytest.mark.parametrize("seen", [(7, 4), (8, 0), (8, 2)])
async def test_who_has_seen_another_lead_leaves_it_a_lease_to_come(node: Node | None, seen: tuple[int, int]) -> None:
    """Redis names nobody, or this very node: but it has gone back behind what was read of a leader who may live."""
    namespace = Scripted(led_by(node))
    follower = follower_of(namespace)
    follower._journal.start(EpochHistory(((0, 0), (7, 3), seen) if seen[0] > 7 else ((0, 0), seen)))
    assert namespace.meta is not None
    assert await follower._follow(namespace.meta) is None
    assert not namespace.done, "however long ago it was heard of: it can't know before it finds this Redis"
    follower._precedence._heard_at -= OWN.lease_ms / 1000
    await follower._follow(namespace.meta)
    assert namespace.done == ["taken over"]


@pytest.mark.parametrize("node", [None, BEFORE])
async def test_who_has_seen_nobody_else_does_not_wait(node: Node | None) -> None:
    namespace = Scripted(led_by(node))
    assert namespace.meta is not None
    await follower_of(namespace)._follow(namespace.meta)
    assert namespace.done == ["taken over"]


@pytest.mark.parametrize(
    ("seen", "then"),
    [
        (((0, 0), (7, 3)), []),  # the batch in flight was never seen again
        (((0, 0), (7, 4), (8, 0)), ["loaded"]),  # it was on the old master, but told to nobody: it is not so
        (
            ((0, 0), (7, 3), (8, 5)),
            ["written anew"],
        ),  # what others have told since is not lost with the Redis that had it
    ],
)
async def test_what_redis_lacks_is_written_anew_if_it_may_have_been_told(
    seen: tuple[Position, ...], then: list[str]
) -> None:
    """Redis is back where this node had come when it led: at the last that it told, with another batch in flight."""
    namespace = Scripted(led_by(None), history=EpochHistory(((0, 0), (7, 3))))
    follower = follower_of(namespace, led=PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 4))), Batch()), (7, 3)))
    follower._knowledge.a_leader_lives()  # others have led since
    follower._journal.start(EpochHistory(seen))
    follower._knowledge.mirror = LazyReplica(StateMachine())
    assert namespace.meta is not None
    await follower._take_over(namespace.meta, unmoved=False)
    assert namespace.done == ["taken over", *then]


async def test_who_has_heard_of_nobody_leaves_time_to_whoever_led_since_redis_was_handed_over() -> None:
    """It may be a new master, which names nobody, for it lacks who has taken over on the old one."""
    namespace = Scripted(led_by(None))
    assert namespace.meta is not None
    follower = newcomer_to(namespace)
    for _ in range(3):
        assert await follower._follow(namespace.meta) is None
    assert namespace.done == ["loaded"]
    loop = asyncio.get_running_loop()
    follower._precedence._heard_at = loop.time() - OWN.lease_ms / 1000 - 1
    assert await follower._follow(namespace.meta) is None
    assert namespace.done == ["loaded"], "those come first who have seen more than it has"
    follower._precedence._heard_at = loop.time() - OWN.lease_ms / 1000 - 2
    await follower._follow(namespace.meta)
    assert namespace.done == ["loaded", "taken over"]


async def test_who_has_led_is_as_new_to_a_redis_that_may_be_another() -> None:
    """Others may have led since it was deposed, or resigned."""
    led = PriorLeadership(Snapshot(EpochHistory(((0, 0), (7, 3))), Batch()), (7, 3))
    namespace = Scripted(led_by(BEFORE))
    assert newcomer_to(namespace, led=led)._precedence.newcomer
    namespace.replaceable = False
    assert not newcomer_to(namespace, led=led)._precedence.newcomer


async def test_who_lost_its_redis_is_new_to_the_next() -> None:
    follower = follower_of(Scripted(led_by(Node(address="other"))))
    follower.interrupted()
    assert follower._precedence.newcomer


@pytest.mark.parametrize(("number", "new"), [(3, True), (4, False)])
async def test_only_what_comes_now_says_that_a_leader_lives(
    monkeypatch: pytest.MonkeyPatch, number: int, new: bool
) -> None:
    """What was in the journal when it was looked at first may have come with the state of another Redis."""
    namespace = Scripted(led_by(Node(address="other"), number=3))
    assert namespace.meta is not None
    follower = newcomer_to(namespace)
    found: list[list[EpochStarted | BatchCommitted]] = [
        [BatchCommitted((7, number), {}, b"0 0 1 1", resigned=False)],
        [EpochStarted((8, 0), (7, number), None)],
    ]

    async def read(_wait_ms: int | None) -> list[EpochStarted | BatchCommitted]:
        if len(found) == 1:
            assert follower._precedence.newcomer == new
        return found.pop(0)

    monkeypatch.setattr(follower._journal, "read", read)
    await follower._listen(namespace.meta, Node(address="other"))
    assert not found


@pytest.mark.parametrize(
    ("known", "read", "respect_s"),
    [
        ((7, 4), None, 0.0),  # it has led on from there
        ((7, 4), (8, 2), 1.0),  # and has read what others led on to
        (None, (7, 4), 1.0),
        (None, (7, 3), 2.0),
        ((7, 3), None, 0.0),
        (None, None, 2.0),
    ],
)
async def test_who_knows_more_comes_first(known: Position | None, read: Position | None, respect_s: float) -> None:
    namespace = Scripted(led_by(BEFORE, number=3))
    follower = newcomer_to(
        namespace, led=known and PriorLeadership(Snapshot(EpochHistory(((0, 0), known)), Batch()), known)
    )
    if read is not None:
        follower._journal.start(EpochHistory(((0, 0), (7, 3), read) if read[0] > 7 else ((0, 0), read)))
        follower._knowledge.mirror = LazyReplica(StateMachine())
    assert follower._precedence.respect_s(namespace.meta) == respect_s
    follower._precedence.newcomer = False
    assert follower._precedence.respect_s(namespace.meta) == (respect_s if respect_s < 2 else 0)


@pytest.mark.parametrize("found", [True, False])
async def test_who_can_not_find_the_master_wishes_for_nothing(found: bool) -> None:
    balancer = LeadershipBalancer()
    for name in "abc":
        balancer.leads(name, "other")
    (name,) = {balancer.wish("own")}
    assert name is not None
    namespace = Scripted(led_by(Node(address="other")), name=name, found=found)
    await follower_of(namespace, balancer=balancer)._wish()
    assert namespace.done == ["wished for"] * found


@pytest.mark.parametrize("where", ["nothing is", "nobody leads", "it lacks what was read", "the leader is silent"])
async def test_who_waits_beside_one_that_has_come_further_leaves_it_the_lead(where: str) -> None:
    namespace = Scripted({"nothing is": None, "nobody leads": led_by(None)}.get(where, led_by(Node(address="gone"))))
    follower = newcomer_to(namespace)
    namespace.furthest = (9, 9)
    if namespace.meta is not None:
        follower._knowledge.mirror = LazyReplica(StateMachine())
        follower._precedence._behind = namespace.meta.tenure, namespace.meta.number
    if where == "it lacks what was read":
        follower._journal.start(EpochHistory(((0, 0), (7, 5))))

    async def look() -> None:
        if namespace.meta is None:
            await follower._nobody()
        elif where == "the leader is silent":
            await follower._lapsed(namespace.meta.tenure, "gone")
        else:
            await follower._follow(namespace.meta)

    await look()
    assert not namespace.done
    namespace.furthest = (0, 0)
    await look()
    assert namespace.done == ["taken over"]
