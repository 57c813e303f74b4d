"""Sample responses of an admin port, for tests of the commands that display them."""

from __future__ import annotations

from typing import Any

import msgspec

from genie.admin.models import (
    Edge,
    HistogramData,
    HotList,
    HotResource,
    Namespace,
    Node,
    QueueSummary,
    Rates,
    State,
    Waits,
)
from genie.version import VERSION

NOW = 1_790_000_010_000
HOLDER = 1_790_000_000_000_007
EMPTY_HISTOGRAM = HistogramData(bounds=[1], counts=[0, 0], total=0)

QUEUES = [
    QueueSummary(
        resource="accounts/1[red]x\x1b[31m" if number == 0 else f"accounts/{number + 1}",
        waiting=30 - number,
        holders=1,
        since=NOW - 9_000,
        holder=HOLDER,
        transaction_name="transfer-7",
    )
    for number in range(20)
]
STATE = State(
    version=VERSION,
    namespace="genie",
    namespaces=[Namespace(namespace="genie", role="leader", leader=None)],
    role="leader",
    leader=None,
    now=NOW,
    uptime=3_600_000,
    store="redis",
    store_available=True,
    store_unavailable_since=None,
    locks_age=0,
    store_full=False,
    history=False,
    store_errors=0,
    held=8,
    waiting=30,
    locks=12,
    resources=9,
    connections=5,
    sessions=2,
    rates=Rates(grants=1200, releases=1199, waits=3.25, timeouts=0, deadlocks=0, errors=0),
    wait_p50=1.25,
    wait_p99=31.0,
    longest_wait=9_000,
    outcomes={},
    errors={},
    deadlocks=0,
    inversions=0,
    rearrangements=0,
    waits=EMPTY_HISTOGRAM,
    holds=EMPTY_HISTOGRAM,
    commits=EMPTY_HISTOGRAM,
    lag=EMPTY_HISTOGRAM,
    queues=QUEUES,
    queues_complete=True,
)
WAITERS = [HOLDER + 10 + number for number in range(30)]
WAITS = Waits(
    nodes=[
        Node(
            id=HOLDER,
            state="held",
            since=NOW - 10_000,
            transaction_name="transfer-7",
            resources=["exclusive:a"],
            resources_total=1,
        ),
        *[
            Node(
                id=id,
                state="queued",
                since=NOW - 9_000 + id - HOLDER,
                resources=["shared:a"],
                resources_total=1,
                blockers_total=12,
            )
            for id in WAITERS
        ],
    ],
    edges=[
        Edge(waiter=id, blocker=HOLDER, resource="a", mode="exclusive", state="held", since=NOW - 10_000)
        for id in WAITERS
    ],
    queue_total=30,
    queue_shown=30,
)
HOT = HotList(
    resources=[
        HotResource(resource=f"hot/{number}", waited=1e6 / (number + 1), conflicts=100 - number, waiting=3, holders=1)
        for number in range(20)
    ]
)


def state(**changes: Any) -> State:
    """Return `STATE` with some fields replaced."""
    return msgspec.structs.replace(STATE, **changes)
