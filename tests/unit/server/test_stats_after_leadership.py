"""Counters of a server continue after it lost leadership."""

from __future__ import annotations

from genie.config import Settings
from genie.observability.metrics import Metrics
from genie.server.app import Server
from genie.storage.store import LeadershipLost


def rearrangements(server: Server) -> float:
    (family,) = [family for family in Metrics(server).collect() if family.name == "genie_queue_rearrangements"]
    return family.samples[0].value


async def test_rearrangements_of_a_past_leadership_are_counted_once() -> None:
    server = Server(Settings(port=0))
    await server.start()
    try:
        assert server.default_namespace.manager is not None
        server.default_namespace.manager.rearrangements = 3
        assert rearrangements(server) == 3
        server.default_namespace._on_leadership_lost(LeadershipLost("another server leads"))
        assert server.default_namespace.manager is None
        assert rearrangements(server) == 3
        assert server.stats.rearrangements == 3
    finally:
        await server.stop()
