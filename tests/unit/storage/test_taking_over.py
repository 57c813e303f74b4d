"""Who takes a namespace over asks last whether it has the master, and leaves time to whoever led by what Redis lacks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from genie.storage.base import Batch, Replica
from genie.storage.follower import Follower
from genie.storage.history import History, Position
from genie.storage.journal import Journal
from genie.storage.link import LinkError
from genie.storage.mirror import Mirror
from genie.storage.namespace import Meta, Namespace, Tenure
from genie.storage.node import Node
from genie.storage.spread import Spread

TENURE = Tenure(7, "nonce", "records")
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
    done: list[str] = field(default_factory=list)
    history: History | None = None
    """By what it has come about that whoever takes it over finds there; None: somebody else is always faster."""
    tenure: Tenure = TENURE

    async def read(self) -> Meta | None:
        self.looks += 1
        return self.meta

    async def wait(self) -> bool:
        return False

    async def verify(self) -> None:
        if self.looks >= self.master_for:
            raise LinkError("there is another master")

    async def take_over(self, *_: Any, **__: Any) -> Position | None:
        self.done.append("taken over")
        return None if self.history is None else self.history.position

    async def write_anew(self, *_: Any) -> None:
        self.done.append("written anew")

    async def load(self) -> AsyncIterator[dict[bytes, bytes]]:
        self.done.append("loaded")
        yield {}


def led_by(node: Node | None, epoch: int = 7, number: int = 3) -> Meta:
    return Meta(Tenure(epoch, "nonce", "records"), node, number, Batch(), ((0, 0),))


def follower_of(namespace: Scripted, *, spread: Spread | None = None, known: Any = None) -> Follower:
    """One that has heard of no leader for longer than any lease."""
    journal = Journal(cast("Any", None), "journal")
    if namespace.meta is not None:
        journal.start(namespace.meta.history)
    made = Follower(cast("Namespace", namespace), journal, OWN, spread or Spread(), lambda _: None, known)
    made._heard_at -= 3600
    made._nobody_since = made._heard_at
    made._newcomer = False
    return made


async def test_the_master_is_looked_for_behind_the_hesitation(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, namespace = Spread(), Scripted(led_by(Node(address="gone")), master_for=2)
    spread.leads("b", "own")
    monkeypatch.setattr("genie.storage.spread.HESITATION_S", 0.001)
    with pytest.raises(LinkError):
        await follower_of(namespace, spread=spread)._lapsed(TENURE)
    assert namespace.looks == 2
    assert not namespace.done


@pytest.mark.parametrize("meta", [led_by(None), led_by(BEFORE)])
async def test_who_need_not_wait_takes_over_from_the_master_alone(meta: Meta) -> None:
    namespace = Scripted(meta, master_for=0)
    with pytest.raises(LinkError):
        await follower_of(namespace)._follow(meta)
    assert not namespace.done


@pytest.mark.parametrize("known", [None, (History(((0, 0), (7, 1))), Batch(), (7, 1))])
async def test_nobody_leads_where_nothing_is_before_it_is_known_to_be_the_master(known: Any) -> None:
    namespace = Scripted(None, master_for=0)
    with pytest.raises(LinkError):
        await follower_of(namespace, known=known)._nobody()
    assert not namespace.done
    namespace.master_for = NEVER
    await follower_of(namespace, known=known)._nobody()
    assert namespace.done == ["taken over" if known is None else "written anew"]


@pytest.mark.parametrize("node", [None, BEFORE])
@pytest.mark.parametrize("seen", [(7, 4), (8, 0), (8, 2)])
async def test_who_has_seen_another_lead_leaves_it_a_lease_to_come(node: Node | None, seen: tuple[int, int]) -> None:
    """Redis names nobody, or this very node: but it has gone back behind what was read of a leader who may live."""
    namespace = Scripted(led_by(node))
    follower = follower_of(namespace)
    follower._journal.start(History(((0, 0), (7, 3), seen) if seen[0] > 7 else ((0, 0), seen)))
    assert namespace.meta is not None
    assert await follower._follow(namespace.meta) is None
    assert not namespace.done, "however long ago it was heard of: it can't know before it finds this Redis"
    follower._heard_at -= OWN.lease_ms / 1000
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
    namespace = Scripted(led_by(None), history=History(((0, 0), (7, 3))))
    follower = follower_of(namespace, known=(History(((0, 0), (7, 4))), Batch(), (7, 3)))
    follower._known = None  # others have led since
    follower._journal.start(History(seen))
    follower._mirror = Mirror(Replica())
    assert namespace.meta is not None
    await follower._take_over(namespace.meta, unmoved=False)
    assert namespace.done == ["taken over", *then]
