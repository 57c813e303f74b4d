"""The faults. Each scenario makes so many of them in one world, and looks after each whether all is as it must be."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from faults.cluster import LEAD_S
from faults.cutter import PLACES, Cut, Cutter
from faults.figures import Figures
from faults.link import Link
from faults.many import hold_many, release_many
from faults.prober import answers
from faults.watch import Broken, Watch
from faults.world import World, world
from servers import Genie

LONG_STOP_S = 30.0
CATCH_UP_S = 50e-6
"""So long for each lock a follower may take that was started anew, until it has read everything. (Nothing tells.)"""
READ_S = 0.02
"""So long after a fault of Redis what was told before has surely been read."""


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
                error.add_note(told(made.watch))
                raise
            found.increments = made.watch.store.increments
            found.counts = made.watch.counts
        return found


def told(watch: Watch) -> str:
    """The end of the history."""
    return "\n".join(["the last of what happened:", *watch.history, *watch.wrong[:20]])


async def asking(w: World, leader: Genie) -> asyncio.Task[float]:
    """Begin to ask the followers, until one of them leads; returns when that was."""
    followers = await w.cluster.followers(leader)
    answer = asyncio.create_task(answers([w.cluster.address(server) for server in followers], w.watch))
    await asyncio.sleep(0.05)
    return answer


async def taken_over(w: World, found: Figures, fault: float, answer: asyncio.Task[float]) -> None:
    """Wait until a follower leads, and has granted a lock."""
    grant = w.watch.grant_after(fault, fresh=True)
    found.answer_s.append(await answer - fault)
    found.away_s.append(await w.waited(grant) - fault)
    found.faults += 1


# -- servers that die ------------------------------------------------------------------------------------------


async def kill_alone(w: World, found: Figures, times: int) -> None:
    """The only server is killed and started again at once."""
    for _ in range(times):
        await w.calm()
        (server,) = w.cluster.servers
        fault = w.cluster.kill(server)
        grant = w.watch.grant_after(fault, fresh=True)
        await w.cluster.restart(server)
        found.away_s.append(await w.waited(grant) - fault)
        found.faults += 1


async def kill_leader(w: World, found: Figures, times: int) -> None:
    """The leader is killed. A follower takes over when the lease is over; then the killed one comes back to follow."""
    for _ in range(times):
        await w.calm()
        leader = await w.cluster.leader()
        answer = await asking(w, leader)
        fault = w.cluster.kill(leader)
        await taken_over(w, found, fault, answer)
        if w.random.random() < 0.5:  # else it comes back while the clients are still on their way
            await w.calm()
        await w.cluster.restart(leader)


async def kill_and_restart(w: World, found: Figures, times: int) -> None:
    """The leader is killed and started again at once, or a while later: it and its followers reach for the lead."""
    for _ in range(times):
        await w.calm()
        leader = await w.cluster.leader()
        fault = w.cluster.kill(leader)
        grant = w.watch.grant_after(fault, fresh=True)
        await asyncio.sleep(w.random.choice([0, w.random.uniform(0, 1.2)]))
        await w.cluster.restart(leader)
        found.away_s.append(await w.waited(grant) - fault)
        found.faults += 1


async def resign(w: World, found: Figures, times: int) -> None:
    """SIGTERM for the leader: it says goodbye, and a follower answers at once."""
    for _ in range(times):
        await w.calm()
        leader = await w.cluster.leader()
        answer = await asking(w, leader)
        fault = w.cluster.send(leader, signal.SIGTERM)
        await taken_over(w, found, fault, answer)
        if (status := await asyncio.to_thread(leader.wait)) != 0:
            raise Broken(f"{leader.port} ended with status {status}")
        await w.cluster.restart(leader)


async def kill_with_many(w: World, found: Figures, times: int, many: int = 100_000) -> None:
    """The leader is killed while many more locks are held, half of them by sessions."""
    ids = await hold_many(w, many)
    for _ in range(times):
        await w.calm()
        await asyncio.sleep(many * CATCH_UP_S)
        leader = await w.cluster.leader()
        answer = await asking(w, leader)
        fault = w.cluster.kill(leader)
        await taken_over(w, found, fault, answer)
        await w.cluster.restart(leader)
    await release_many(w, ids)


# -- servers that are stopped ----------------------------------------------------------------------------------


async def stop_leader(w: World, found: Figures, times: int) -> None:
    """The leader is stopped until a follower leads, and goes on: not a word more, every connection closed, it follows."""
    for _ in range(times):
        await w.calm()
        leader = await w.cluster.leader()
        answer = await asking(w, leader)
        fault = w.cluster.send(leader, signal.SIGSTOP)
        await taken_over(w, found, fault, answer)
        await w.everybody_served()
        address = w.cluster.address(leader)
        before = [link for link in w.links if link.address == address and (link.heard_at or fault) < fault]
        w.watch.counts["connections left to the stopped leader"] += len(before)
        for number, link in enumerate(before):
            link.send("ping")
            link.send("request", resources=[f"exclusive:late/{number}"])
        w.watch.silenced[address] = fault
        w.cluster.send(leader, signal.SIGCONT)
        await closed(before)
        await w.cluster.followers(await other_leader(w, leader))
        await w.calm()
        del w.watch.silenced[address]


async def closed(links: list[Link]) -> None:
    """Until the server has ended all of these."""
    end = time.monotonic() + LEAD_S
    while any(not link.closed for link in links):
        if time.monotonic() > end:
            raise Broken(f"{sum(not link.closed for link in links)} connections to the old leader are left open")
        await asyncio.sleep(0.005)


async def other_leader(w: World, old: Genie) -> Genie:
    """Who leads now, which is another one."""
    leader = await w.cluster.leader()
    if leader is old:
        raise Broken(f"{old.port} leads again")
    return leader


# -- Redis -----------------------------------------------------------------------------------------------------


async def kill_redis(w: World, found: Figures, times: int) -> None:
    """Redis is killed and started again: at once, after a part of the lease, or after more than the lease."""
    for _ in range(times):
        await w.calm()
        w.watch.note("fault", "kill -9 Redis")
        fault = time.monotonic()
        w.cluster.redis.kill()
        grant = w.watch.grant_after(fault + READ_S, fresh=False)
        await asyncio.sleep(w.random.choice([0, w.random.uniform(0, 0.6), w.random.uniform(1.2, 2.5)]))
        await asyncio.to_thread(w.cluster.redis.start)
        w.watch.note("fault", "Redis is back")
        back = time.monotonic()
        granted = await w.waited(grant)
        found.away_s.append(granted - fault)
        found.back_s.append(max(0.0, granted - back))
        found.faults += 1


async def stop_redis(w: World, found: Figures, times: int, stop_s: float = LONG_STOP_S) -> None:
    """Redis is stopped for longer than the lease, and goes on."""
    for _ in range(times):
        await w.calm()
        fault = w.cluster.send(w.cluster.redis, signal.SIGSTOP)
        grant = w.watch.grant_after(fault + READ_S, fresh=False)
        await asyncio.sleep(stop_s)
        if grant.done():
            raise Broken(f"a lock was granted {grant.result() - fault:.3f} s after Redis was stopped")
        back = w.cluster.send(w.cluster.redis, signal.SIGCONT)
        granted = await w.waited(grant)
        found.away_s.append(granted - fault)
        found.back_s.append(granted - back)
        found.faults += 1


# -- connections -----------------------------------------------------------------------------------------------

SAID = (
    ("hello", "request", "release", "extend", "ping"),
    ("welcome", "queued", "locked", "released", "extended", "pong"),
)
CLIENT_CUTS = [Cut(not side, kind, place) for side in (0, 1) for kind in SAID[side] for place in PLACES]
REDIS_CUTS = [
    *[Cut(to_server=True, kind=kind, place=place) for kind in ("EVALSHA", "XREAD") for place in PLACES],
    *[Cut(to_server=False, kind="reply", place=place) for place in PLACES],
]


async def cut_clients(w: World, found: Figures, times: int) -> None:
    """A connection of a client is cut at each kind of message, in each direction."""
    await cut(w, found, times, w.front, CLIENT_CUTS)


async def cut_redis(w: World, found: Figures, times: int) -> None:
    """A connection of a server to Redis is cut: at a commit, at a look into the journal, at a reply."""
    await cut(w, found, times, w.back, REDIS_CUTS)


async def cut(w: World, found: Figures, times: int, cutters: list[Cutter], kinds: list[Cut]) -> None:
    """Make the cuts in turns, in an order of their own each time; now and then one falls upon another."""
    order: list[Cut] = []
    while found.faults < times:
        if not order:
            order = w.random.sample(kinds, len(kinds))
        what = order.pop()
        for cutter in cutters:
            cutter.arm(what)
        fired = [asyncio.create_task(cutter.fired.wait()) for cutter in cutters]
        done, late = await asyncio.wait(fired, timeout=LEAD_S, return_when=asyncio.FIRST_COMPLETED)
        for task in late:
            task.cancel()
        if not done:
            raise Broken(f"there was nothing to cut {what} for {LEAD_S:g} s")
        fault = time.monotonic()
        w.watch.note("fault", f"cut {what}")
        found.faults += 1
        found.away_s.append(await w.waited(w.watch.grant_after(fault, fresh=False)) - fault)
        if w.random.random() < 0.7:  # else the next one comes upon those who are not yet back
            await w.everybody_served()


SCENARIOS = (
    Scenario("kill-alone", "`kill -9` of the only server, started again at once", 100, kill_alone, {"servers": 1}),
    Scenario("kill-leader", "`kill -9` of the leader, one follower", 60, kill_leader, {"servers": 2}),
    Scenario("kill-leader-of-3", "`kill -9` of the leader, two followers", 40, kill_leader, {"servers": 3}),
    Scenario("kill-and-restart", "`kill -9` of the leader, started again soon", 60, kill_and_restart, {"servers": 2}),
    Scenario("resign", "SIGTERM of the leader", 50, resign, {"servers": 2}),
    Scenario(
        "stop-leader", "the leader stopped (SIGSTOP), later continued", 50, stop_leader, {"servers": 2, "library": 0}
    ),
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
    Scenario("kill-with-many", "`kill -9` of the leader, 100,000 locks held", 10, kill_with_many, {"servers": 2}),
)
