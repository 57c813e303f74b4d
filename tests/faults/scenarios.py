"""The faults by their names. Each scenario makes so many in one world, and looks after each whether all is as it must be."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from faults.cuts import cut_and_kill, cut_clients, cut_redis
from faults.figures import Figures
from faults.masters_change import hand_over, isolate_master, kill_lagging
from faults.masters_die import kill_master, stop_master
from faults.redis_fails import kill_redis, stop_redis
from faults.server_stops import stop_leader
from faults.servers_end import kill_alone, kill_and_restart, kill_leader, kill_with_many, resign
from faults.slots_move import move_slot
from faults.world import World, world
from redises.cluster import running_cluster
from redises.sentinels import running_sentinels


@dataclass(frozen=True)
class Scenario:
    """`times` is how often its fault is made in the long form."""

    name: str
    title: str
    times: int
    run: Callable[[World, Figures, int], Awaitable[None]]
    settings: dict[str, Any]

    async def play(self, seed: str, times: int, **settings: Any) -> Figures:
        """One world from a seed, so many faults, and the figures. Broken, if a promise was not kept."""
        found = Figures(self.name, self.title)
        async with world(seed, **settings | self.settings) as made:
            try:
                began = time.monotonic()
                await self.run(made, found, times)
                await made.finish()
                found.seconds = time.monotonic() - began
            except BaseException as error:
                error.add_note(told(made))
                raise
            found.increments = made.watch.store.increments
            found.counts = made.watch.counts
        return found


def told(w: World) -> str:
    """The end of the history, and of what each server said."""
    lines = ["the last of what happened:", *w.watch.history, *w.watch.wrong[:20]]
    for server in w.cluster.servers:
        lines += [f"the last that {server.port} logged:", *map(str, server.said()[-LOGGED:])]
    return "\n".join(lines)


LOGGED = 20
"""Lines of the log of each server that a failure shows."""
FRONTED = partial(running_sentinels, fronts=True)
SCENARIOS = (
    Scenario("kill-alone", "`kill -9` of the only server, started again at once", 100, kill_alone, {"servers": 1}),
    Scenario("kill-leader", "`kill -9` of the leader, one follower", 60, kill_leader, {"servers": 2}),
    Scenario("kill-leader-of-3", "`kill -9` of the leader, two followers", 40, kill_leader, {"servers": 3}),
    Scenario(
        "kill-and-restart", "`kill -9` of the leader, started again within 1.2 s", 60, kill_and_restart, {"servers": 2}
    ),
    Scenario("resign", "SIGTERM of the leader", 50, resign, {"servers": 2}),
    Scenario("stop-leader", "the leader stopped (SIGSTOP), later continued", 50, stop_leader, {"servers": 2}),
    Scenario("kill-redis", "`kill -9` of Redis, started again after 0 to 2.5 s", 100, kill_redis, {"servers": 2}),
    Scenario("stop-redis", "Redis stopped for 30 s", 4, stop_redis, {"servers": 2}),
    Scenario(
        "cut-clients",
        "a client's connection cut at every kind of message",
        990,
        cut_clients,
        {"servers": 2, "front": True, "drops": 0.05},
    ),
    Scenario("cut-redis", "a connection to Redis cut", 450, cut_redis, {"servers": 2, "back": True}),
    Scenario(
        "cut-and-kill",
        "a commit cut off, and its server killed (started again at once)",
        60,
        cut_and_kill,
        {"servers": 2, "back": True},
    ),
    Scenario(
        "kill-master",
        "`kill -9` of a master, sentinels name another",
        40,
        kill_master,
        {"servers": 2, "redis": running_sentinels},
    ),
    Scenario(
        "kill-lagging",
        "the same, its replicas lagging by up to 0.3 s",
        40,
        kill_lagging,
        {"servers": 2, "redis": FRONTED},
    ),
    Scenario(
        "stop-master",
        "a master stopped (SIGSTOP), continued when there is another",
        40,
        stop_master,
        {"servers": 2, "redis": running_sentinels},
    ),
    Scenario(
        "isolate-master",
        "a master cut off from sentinels and replicas, not from Genie",
        40,
        isolate_master,
        {"servers": 2, "redis": FRONTED},
    ),
    Scenario("hand-over", "`SENTINEL FAILOVER`", 40, hand_over, {"servers": 2, "redis": running_sentinels}),
    Scenario(
        "move-slot",
        "the slot moves in a cluster, with pauses",
        100,
        move_slot,
        {"servers": 2, "redis": running_cluster},
    ),
    Scenario(
        "kill-member",
        "`kill -9` of the slot's master in a cluster",
        40,
        kill_master,
        {"servers": 2, "redis": running_cluster},
    ),
    Scenario(
        "stop-member",
        "the slot's master in a cluster stopped, continued later",
        40,
        stop_master,
        {"servers": 2, "redis": running_cluster},
    ),
    Scenario("kill-with-many", "`kill -9` of the leader, 100,000 locks held", 10, kill_with_many, {"servers": 2}),
)
