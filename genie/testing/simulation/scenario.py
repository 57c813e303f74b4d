"""What a seed makes of a simulated world: who is in it, what they do, and what breaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

FAULTS = (
    "cut a client",
    "cut the store",
    "stall the store",
    "restart the store",
    "forget scripts",
    "bad commands",
    "kill a server",
    "restart a server",
    "stop a server",
    "stop a client",
    "kill a client",
    "separate",
)
"""What may happen in any world. (What loses acknowledged writes is in `LOSSES`.)"""

CHOOSING = 1_000_000
"""Worlds from this seed on have clients that also take any of several resources. (The others are as they were before there
was that, so that what a seed has shown once can be shown again.)"""

REPLICATED = 2_000_000
"""Worlds from this seed on have three Redises with sentinels."""

FEATURED = 3_000_000
"""Worlds from this seed on have clients that use what version 1 of the wire added: quiet connections, `bye`, `release` by
`ref`, rejected `hello`s, repeated refs of ended requests, waits without a limit, amounts as strings. Every third world
has three Redises, and in every other one clients also take any of several resources."""

FAILOVERS = (
    "lag",
    "kill a master",
    "fail over",
    "stall a master",
    "split",
)
"""What may happen there besides. (Nothing of `LOSSES` does: a replica would follow.)"""

LOSSES = ("lose writes", "flush the store")


@dataclass(slots=True)
class Plan:
    """A world. Durations are virtual."""

    seed: int
    servers: int = 1
    raw: int = 2
    sessions: int = 2
    shipped: int = 1
    """Clients: without and with sessions on the bare wire, and those of this package."""
    resources: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    shared: float = 0.3
    transactions: bool = True
    priorities: bool = True
    choosing: bool = False
    featured: bool = False
    """Clients use what version 1 of the wire added; see `FEATURED`."""
    at_once: int = 6
    """Requests of one client that live at the same time."""
    think_s: float = 0.3
    active_s: float = 20.0
    """How long it lasts before all faults stop and everything comes to its end."""
    faults: list[str] = field(default_factory=list)
    every_s: float = 3.0
    """Between two faults, on average."""
    slow: float = 0.02
    """The share of pieces that are long on their way."""
    redises: int = 1
    """One, or three with sentinels."""
    min_replicas: int = 0
    lag_s: float = 0.0
    """How long a write may take beyond its way before a replica has it."""


def plan(seed: int) -> Plan:
    """The world of a seed. A few kinds of faults in each, so that each kind is met with few others."""
    random = Random(f"{seed} plan")
    faults = random.sample(FAULTS, random.choice([0, 1, 2, 3, 4, 6, len(FAULTS)]))
    if random.random() < 0.25:
        faults.append(random.choice(LOSSES))
    featured = seed >= FEATURED
    replicated = seed % 3 == 0 if featured else seed >= REPLICATED
    chance = Random(f"{seed} replicated")
    if replicated:
        faults = [kind for kind in faults if kind not in LOSSES]
        faults += 2 * chance.sample(FAILOVERS, chance.choice([1, 1, 2, 3, len(FAILOVERS)]))
    clients = random.choice([(3, 0, 0), (0, 3, 0), (0, 0, 3), (2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 3, 0)])
    servers = random.choice([1, 1, 2, 3])
    if replicated:
        servers = chance.choice([1, 2, 2, 3, 3])
    return Plan(
        seed=seed,
        servers=servers,
        raw=clients[0],
        sessions=clients[1],
        shipped=clients[2],
        resources=[chr(97 + i) for i in range(random.choice([1, 2, 3, 3, 4, 6]))],
        shared=random.choice([0.0, 0.3, 0.6]),
        transactions=random.random() < 0.6,
        priorities=random.random() < 0.5,
        at_once=random.choice([3, 6, 10]),
        think_s=random.choice([0.1, 0.25, 0.5]),
        active_s=random.choice([8.0, 15.0, 25.0]),
        faults=faults,
        every_s=random.choice([0.7, 1.5, 3.0]),
        slow=random.choice([0.0, 0.02, 0.1]),
        choosing=seed % 2 == 0 if featured else seed >= CHOOSING and (not replicated or chance.random() < 0.25),
        featured=featured,
        redises=3 if replicated else 1,
        min_replicas=chance.choice([0, 0, 1]) if replicated else 0,
        lag_s=chance.choice([0.0, 0.005, 0.1, 1.0]) if replicated else 0.0,
    )


# -- What the clients of a simulated world ask for --------

NO_LIMIT_MS = 2_147_483_647
"""A `queueTimeout` that never ends a wait."""
NOTES = ("cron@host-7", "ä note with \U0001f510", "x" * 256)


class Wishes:
    """Makes up requests as a plan says.

    `extra` decides the fields that only featured worlds have, so that the requests of other worlds stay as they were.
    """

    def __init__(self, plan: Plan, random: Random, extra: Random | None = None) -> None:
        self.plan = plan
        self.random = random
        self._extra = extra if plan.featured else None

    def resources(self) -> list[str]:
        """Some names, with their modes."""
        random, plan = self.random, self.plan
        count = min(random.choice([1, 1, 1, 2, 2, 3]), len(plan.resources))
        shared = plan.shared
        return [
            ("shared:" if random.random() < shared else "exclusive:") + name
            for name in random.sample(plan.resources, count)
        ]

    def transaction(self, who: str) -> str | None:
        """One of a few that are shared by all, one of the client's own, or none."""
        random, plan = self.random, self.plan
        if not plan.transactions or random.random() < 0.4:
            return None
        return f"t{random.randint(1, 3)}" if random.random() < 0.3 else f"{who}-{random.randint(1, 3)}"

    def payload(self, who: str) -> dict[str, Any]:
        """A `request`, but for its `ref`."""
        random = self.random
        if self.plan.choosing and random.random() < 0.4:
            return self._featured(self.choice(who))
        payload: dict[str, Any] = {"resources": self.resources()}
        if random.random() < 0.8:
            payload["queueTimeout"] = random.choice([0, 50, 400, 2_000, 5_000, 20_000])
        if random.random() < 0.9:
            payload["transactionTimeout"] = random.choice([20, 300, 1_000, 3_000, 12_000])
        transaction = self.transaction(who)
        if transaction is not None:
            payload["transactionName"] = transaction
        if self.plan.priorities and random.random() < 0.3:
            payload["priority"] = random.choice([-1, 1, 5])
        if random.random() < 0.15:
            payload["onDisconnect"] = "release"
        return self._featured(payload)

    def _featured(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Add or change fields, in featured worlds."""
        extra = self._extra
        if extra is None:
            return payload
        if extra.random() < 0.3:
            payload["note"] = extra.choice(NOTES)
        if "resources" in payload and extra.random() < 0.08:
            payload["queueTimeout"] = NO_LIMIT_MS
        if "anyOf" in payload and extra.random() < 0.5:
            payload["target"] = str(payload["target"] * 10**30)
            payload["weights"] = [
                str(weight * 10**30) for weight in payload.get("weights") or [1] * len(payload["anyOf"])
            ]
        return payload

    def choice(self, who: str) -> dict[str, Any]:
        """A `request` for any of several."""
        random, plan = self.random, self.plan
        names = random.sample(plan.resources, random.randint(1, len(plan.resources)))
        payload: dict[str, Any] = {
            "anyOf": [("shared:" if random.random() < plan.shared else "exclusive:") + name for name in names],
            "target": random.choice([2, 2, 4, 5]),
            "transactionTimeout": random.choice([20, 300, 1_000, 3_000, 12_000]),
        }
        if random.random() < 0.5:
            payload["weights"] = [random.choice([1, 2, 4]) for _ in names]
        else:
            payload["target"] = (payload["target"] + 1) // 2
        transaction = self.transaction(who)
        if transaction is not None:
            payload["transactionName"] = transaction
        if random.random() < 0.15:
            payload["onDisconnect"] = "release"
        return payload
