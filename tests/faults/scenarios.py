"""All scenarios: each injects one kind of fault several times, and checks the guarantees after each."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from faults.append_only_file import OPTIONS
from faults.connection_cuts import cut_and_kill, cut_clients, cut_redis
from faults.environment import Environment, environment, single_redis
from faults.primary_changes import fail_over, isolate_primary, kill_lagging
from faults.primary_failures import kill_primary, stop_primary
from faults.redis_failures import kill_redis, lose_last_second, stop_redis
from faults.results import Results
from faults.server_failures import kill_and_restart, kill_leader, kill_only_server, kill_with_many, resign
from faults.slot_migration import move_slot
from faults.stopped_leader import stop_leader
from redises.cluster import running_cluster
from redises.sentinels import running_sentinels


@dataclass(frozen=True)
class Scenario:
    """One kind of fault. `times` is the full number of faults; `settings` are arguments of `environment`."""

    name: str
    title: str
    times: int
    run: Callable[[Environment, Results, int], Awaitable[None]]
    settings: dict[str, Any]

    async def play(self, seed: str, times: int, **settings: Any) -> Results:
        """Run the scenario in an environment from a seed; return the measurements. Violation if a guarantee was violated."""
        results = Results(self.name, self.title)
        async with environment(seed, **settings | self.settings) as env:
            try:
                started_at = time.monotonic()
                await self.run(env, results, times)
                await env.finish()
                results.seconds = time.monotonic() - started_at
            except BaseException as error:
                error.add_note(history_of(env))
                raise
            results.increments = env.checker.store.increments
            results.counts = env.checker.counts
        return results


def history_of(env: Environment) -> str:
    """Return the end of the history, and of the log of each server."""
    lines = ["the end of the history:", *env.checker.history, *env.checker.violations[:20]]
    for server in env.cluster.servers:
        lines += [f"the end of the log of {server.port}:", *map(str, server.log_so_far()[-LOG_LINES:])]
    return "\n".join(lines)


LOG_LINES = 20
"""How many lines of the log of each server a failure shows."""
SENTINELS_WITH_PROXIES = partial(running_sentinels, fronts=True)
SCENARIOS = (
    Scenario(
        "kill-alone", "`kill -9` of the only server, started again at once", 100, kill_only_server, {"servers": 1}
    ),
    Scenario("kill-leader", "`kill -9` of the leader, one follower", 60, kill_leader, {"servers": 2}),
    Scenario("kill-leader-of-3", "`kill -9` of the leader, two followers", 40, kill_leader, {"servers": 3}),
    Scenario(
        "kill-and-restart", "`kill -9` of the leader, started again within 1.2 s", 60, kill_and_restart, {"servers": 2}
    ),
    Scenario("resign", "SIGTERM of the leader", 50, resign, {"servers": 2}),
    Scenario("stop-leader", "the leader stopped (SIGSTOP), later continued", 50, stop_leader, {"servers": 2}),
    Scenario("kill-redis", "`kill -9` of Redis, started again after 0 to 2.5 s", 100, kill_redis, {"servers": 2}),
    Scenario(
        "lose-second",
        "`kill -9` of Redis, the last second of its file lost",
        100,
        lose_last_second,
        {"servers": 2, "redis": partial(single_redis, *OPTIONS)},
    ),
    Scenario("stop-redis", "Redis stopped for 30 s", 4, stop_redis, {"servers": 2}),
    Scenario(
        "cut-clients",
        "a client's connection cut at every kind of message",
        990,
        cut_clients,
        {"servers": 2, "proxy_clients": True, "drop_probability": 0.05},
    ),
    Scenario("cut-redis", "a connection to Redis cut", 450, cut_redis, {"servers": 2, "proxy_redis": True}),
    Scenario(
        "cut-and-kill",
        "a connection cut at a commit, and its server killed (started again at once)",
        60,
        cut_and_kill,
        {"servers": 2, "proxy_redis": True},
    ),
    Scenario(
        "kill-primary",
        "`kill -9` of a primary, sentinels name another",
        40,
        kill_primary,
        {"servers": 2, "redis": running_sentinels},
    ),
    Scenario(
        "kill-lagging",
        "the same, its replicas lagging by up to 0.3 s",
        40,
        kill_lagging,
        {"servers": 2, "redis": SENTINELS_WITH_PROXIES},
    ),
    Scenario(
        "stop-primary",
        "a primary stopped (SIGSTOP), continued when there is another",
        40,
        stop_primary,
        {"servers": 2, "redis": running_sentinels},
    ),
    Scenario(
        "isolate-primary",
        "a primary cut off from sentinels and replicas, not from Genie",
        40,
        isolate_primary,
        {"servers": 2, "redis": SENTINELS_WITH_PROXIES},
    ),
    Scenario("hand-over", "`SENTINEL FAILOVER`", 40, fail_over, {"servers": 2, "redis": running_sentinels}),
    Scenario(
        "move-slot",
        "the slot moves in a cluster, with pauses",
        100,
        move_slot,
        {"servers": 2, "redis": running_cluster},
    ),
    Scenario(
        "kill-member",
        "`kill -9` of the slot's primary in a cluster",
        40,
        kill_primary,
        {"servers": 2, "redis": running_cluster},
    ),
    Scenario(
        "stop-member",
        "the slot's primary in a cluster stopped, continued later",
        40,
        stop_primary,
        {"servers": 2, "redis": running_cluster},
    ),
    Scenario("kill-with-many", "`kill -9` of the leader, 100,000 locks held", 10, kill_with_many, {"servers": 2}),
)
