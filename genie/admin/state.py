"""`/api/state`, `/api/hot`, `/api/deadlocks`: made from what a server counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice

from msgspec import UNSET

from genie.admin import answers, looks
from genie.admin.pace import Pace
from genie.admin.subject import Subject
from genie.core import Wait
from genie.core.table import Table
from genie.observability.histogram import Histogram
from genie.observability.hot import Heat, hottest
from genie.observability.stats import Deadlock, Stats

AT_ONCE = 250
"""Hot resources that are compared in one go."""
STEPS = 1_000
"""Steps of one cycle that are told."""
_VERSION = version("genie-lock")
_BEGAN = time.monotonic()


async def state(subject: Subject, namespace: str, pace: Pace) -> answers.State:
    """The server at a glance, as to one namespace. One that doesn't lead it has no locks."""
    seat = subject.seats[namespace]
    manager, stats = seat.manager, seat.stats
    table = Table() if manager is None else manager.table
    lines, complete = await looks.lines(table, pace)
    first = next(iter(table.waiting.values()), None)
    now, speed = time.time() * 1000, stats.recent.speed()
    return answers.State(
        version=_VERSION,
        namespace=namespace,
        namespaces=[
            answers.Namespace(namespace=name, role=other.role, leader=other.leader)
            for name, other in subject.seats.items()
        ],
        role=seat.role,
        leader=seat.leader,
        now=int(now),
        uptime=int((time.monotonic() - _BEGAN) * 1000),
        store="memory" if subject.settings.redis_url is None else "redis",
        store_reached=seat.reaches_store,
        store_errors=seat.store_errors,
        held=len(table.held),
        waiting=len(table.waiting),
        locks=table.locks,
        resources=len(table.sole) + len(table.resources),
        connections=len(subject.connections),
        sessions=seat.sessions,
        rates=answers.Rates(
            grants=speed.grants,
            releases=speed.releases,
            waits=speed.waits,
            timeouts=speed.timeouts,
            deadlocks=speed.deadlocks,
            errors=speed.errors,
        ),
        wait_p50=stats.recent.wait_quantile(0.5),
        wait_p99=stats.recent.wait_quantile(0.99),
        longest_wait=0 if first is None else max(0, int(now - first.since_unix_ms)),
        outcomes=stats.outcomes,
        errors=dict(stats.errors),
        deadlocks=stats.deadlocked,
        reorderings=stats.reorderings + (0 if manager is None else manager.reorderings),
        waits=_count(stats.waits),
        holds=_count(stats.holds),
        commits=_count(stats.commits),
        lag=_count(subject.stats.lag),
        lines=lines,
        lines_complete=complete,
    )


def _count(histogram: Histogram) -> answers.Count:
    return answers.Count(bounds=list(histogram.bounds), counts=list(histogram.counts), total=histogram.total)


async def hot(stats: Stats, table: Table, limit: int, pace: Pace) -> answers.HotList:
    """So many of the hottest resources: by the waits that have ended lately, and by those that go on."""
    going = await looks.still_waited(table, time.time() * 1000, pace)
    found, best = _together(stats.hot.found(), going), list[tuple[str, Heat]]()
    while more := list(islice(found, AT_ONCE)):
        best = hottest([*best, *more], limit)
        await pace.did(2 * len(more))
    return answers.HotList(resources=[_hot(table, name, heat) for name, heat in best])


def _together(found: Iterator[tuple[str, Heat]], going: dict[str, float]) -> Iterator[tuple[str, Heat]]:
    """Each resource once, with the time (ms) of the waits that go on."""
    for name, heat in found:
        yield name, Heat(heat.collisions, heat.waited_ms + going.pop(name, 0.0))
    for name, waited_ms in going.items():
        yield name, Heat(0, waited_ms)


def _hot(table: Table, name: str, heat: Heat) -> answers.HotResource:
    resource = table.look(name)
    return answers.HotResource(
        resource=name,
        waited=heat.waited_ms,
        collisions=heat.collisions,
        waiting=0 if resource is None or resource.line is None else len(resource.line),
        holders=0 if resource is None else len(resource.holders),
    )


async def deadlocks(stats: Stats, limit: int, pace: Pace) -> answers.Deadlocks:
    """So many of the latest deadlocks."""
    rows = []
    for deadlock in list(stats.deadlocks)[: -limit - 1 : -1]:
        rows.append(_deadlock(deadlock))
        await pace.did(looks.NODE_WORK + len(rows[-1].waits))
    return answers.Deadlocks(deadlocks=rows, total=stats.deadlocked)


def _deadlock(deadlock: Deadlock) -> answers.DeadlockRow:
    waits = deadlock.cycle.waits
    return answers.DeadlockRow(
        at=int(deadlock.at_unix_ms),
        id=deadlock.id,
        transaction_name=deadlock.transaction,
        cycle=[str(owner) for owner in deadlock.cycle.owners[:STEPS]],
        waits=[_step(wait) for wait in waits[:STEPS]],
        steps_total=len(waits),
    )


def _step(wait: Wait) -> answers.Step:
    note = UNSET if wait.note is None else wait.note
    return answers.Step(resource=wait.resource, waiter=wait.waiter, holder=wait.holder, note=note)
