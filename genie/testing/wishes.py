"""What the clients of a simulated world ask for."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genie.testing.plan import Plan


class Wishes:
    """Makes up requests as a plan says."""

    def __init__(self, plan: Plan, random: Random) -> None:
        self.plan = plan
        self.random = random

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
            return self.choice(who)
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
        return payload

    def choice(self, who: str) -> dict[str, Any]:
        """A `request` for any of several."""
        random, plan = self.random, self.plan
        names = random.sample(plan.resources, random.randint(1, len(plan.resources)))
        payload: dict[str, Any] = {
            "anyOf": [("shared:" if random.random() < plan.shared else "exclusive:") + name for name in names],
            "target": random.choice([1, 1, 2, 2.5]),
            "transactionTimeout": random.choice([20, 300, 1_000, 3_000, 12_000]),
        }
        if random.random() < 0.5:
            payload["weights"] = [random.choice([0.5, 1, 2]) for _ in names]
        transaction = self.transaction(who)
        if transaction is not None:
            payload["transactionName"] = transaction
        if random.random() < 0.15:
            payload["onDisconnect"] = "release"
        return payload
