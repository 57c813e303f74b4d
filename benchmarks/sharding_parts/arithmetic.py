"""What follows without a simulation: shards touched, messages, capacity, and outages that are met."""

from __future__ import annotations

from benchmarks.sharding_parts.world import Costs


def touched(resources: int, shards: int) -> float:
    """On how many shards so many resources lie, on average, where a hash spreads them evenly."""
    return shards * (1 - (1 - 1 / shards) ** resources)


def gain(resources: int, shards: int, costs: Costs) -> float:
    """How many times the cycles of one leader so many shards can do, at most.

    A cycle is a request and a release. Over shards it is one of each for every shard that it touches, and the resources
    are shared out among them.
    """
    parts = touched(resources, shards)
    whole_us = costs.command_us + costs.further_us * (resources - 1)
    spread_us = parts * costs.command_us + costs.further_us * (resources - parts)
    return shards * whole_us / spread_us


def wait_ms(parts: float, costs: Costs, *, chained: bool) -> float:
    """From asking to holding all where nothing is in the way and no processor is busy."""
    one_ms = costs.hop_ms + costs.of(1) + costs.commit_ms + costs.hop_ms
    return one_ms * parts - (costs.hop_ms * (parts - 1) if chained else 0)
