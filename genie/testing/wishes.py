"""What the clients of a simulated world ask for."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genie.testing.plan import Plan

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
