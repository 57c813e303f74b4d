"""Who hesitates to take over looks once more who is the master: it may have changed meanwhile."""

from __future__ import annotations

from typing import Any, cast

import pytest

from genie.storage.base import Batch
from genie.storage.follower import Follower
from genie.storage.journal import Journal
from genie.storage.link import LinkError
from genie.storage.namespace import Meta, Namespace, Tenure
from genie.storage.node import Node
from genie.storage.spread import Spread

TENURE = Tenure(7, "nonce", "records")


class Moving:
    """A namespace whose master is another one from the second look on."""

    name = "a"
    replaceable = True
    looks = 0
    taken = False

    async def read(self) -> Meta:
        self.looks += 1
        return Meta(TENURE, Node(address="gone"), 0, Batch(), ())

    async def verify(self) -> None:
        if self.looks > 1:
            raise LinkError("there is another master")

    async def take_over(self, *_: Any, **__: Any) -> None:
        self.taken = True


async def test_the_master_is_looked_for_behind_the_hesitation(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, namespace, node = Spread(), Moving(), Node(address="own")
    spread.leads("b", "own")
    journal = Journal(cast("Any", None), "journal")
    meta = await namespace.read()
    namespace.looks = 0
    journal.start(meta.history)
    follower = Follower(cast("Namespace", namespace), journal, node, spread, lambda _: None)
    monkeypatch.setattr("genie.storage.spread.HESITATION_S", 0.001)
    with pytest.raises(LinkError):
        await follower._lapsed(TENURE)
    assert not namespace.taken
