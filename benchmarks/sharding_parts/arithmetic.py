"""Results that need no simulation: number of shards of a request, messages and capacity."""

from __future__ import annotations

from benchmarks.sharding_parts.world import Costs


def touched(resources: int, shards: int) -> float:
    """Return the mean number of shards on which this number of resources is located, with a uniform
    hash.
    """
    return shards * (1 - (1 - 1 / shards) ** resources)


def gain(resources: int, shards: int, costs: Costs) -> float:
    """Return the maximum throughput of this number of shards, in relation to one leader.

    A cycle is a request and a release. On shards, each is sent to every shard that has one of the
    resources, and the resources are divided among them.
    """
    parts = touched(resources, shards)
    whole_us = costs.command_us + costs.further_us * (resources - 1)
    spread_us = parts * costs.command_us + costs.further_us * (resources - parts)
    return shards * whole_us / spread_us


def wait_ms(parts: float, costs: Costs, *, chained: bool) -> float:
    """Return the time from the request to the complete grant, without contention and with idle
    processors.
    """
    one_ms = costs.hop_ms + costs.of(1) + costs.commit_ms + costs.hop_ms
    return one_ms * parts - (costs.hop_ms * (parts - 1) if chained else 0)
