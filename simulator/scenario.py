"""What a seed decides: the topology, the faults and the workload of a simulation."""

from __future__ import annotations

from asyncio import Event
from dataclasses import dataclass, field
from random import Random
from typing import Any

from simulator.history import ClusterHistory

FAULTS = (
    "reset a client connection",
    "reset a store connection",
    "pause the store",
    "restart the store",
    "flush scripts",
    "fail commands",
    "kill a server",
    "restart a server",
    "pause a server",
    "pause a client",
    "kill a client",
    "partition hosts",
)
"""Faults for every scenario. Faults that lose acknowledged writes are listed in `LOSSES`."""

FIRST_ANY_OF_SEED = 1_000_000
"""From this seed on, clients also request any of several resources (`anyOf`). The ranges of seeds keep the histories of
lower seeds unchanged when a feature is added, so that an earlier failure can still be reproduced."""

FIRST_REPLICATED_SEED = 2_000_000
"""From this seed on, there are three Redis servers with sentinels."""

FIRST_V1_FEATURES_SEED = 3_000_000
"""From this seed on, clients use the features that version 1 of the protocol added: quiet connections, `bye`, `release` by
`ref`, rejected `hello`s, repeated refs of ended requests, unlimited waits, notes, amounts as strings. Every third scenario
has three Redis servers, and every second scenario has `anyOf` requests."""

FIRST_BELIEF_SEED = 4_000_000
"""From this seed on, all clients use the library, hold locks for long, and record which locks they consider held; see
`beliefs.py`. Connections become half-open, or lose the bytes of one direction. Every fourth scenario has three Redis servers."""

FIRST_LOCK_KINDS_SEED = 5_000_000
"""From this seed on, clients also ask for units of counted resources and for subtrees. In all other respects, the scenarios are
those from `FIRST_V1_FEATURES_SEED` on."""

FIRST_CRASH_SEED = 6_000_000
"""From this seed on, there is one Redis, which crashes: it loses up to its last second, is down for a while, and then loads its
data. Servers load the records in many parts, which take a while. The clients are those from `FIRST_LOCK_KINDS_SEED` on."""

NAMES_OF_ALL_KINDS = ("a/1", "a/2", "a/b/1", "a/b/2", "c")
SUBTREES = ("a/**", "a/b/**", "**")
"""The resources of scenarios with all kinds of locks: names at several depths, and the subtrees that contain some of them."""

HALF_OPEN = ("half-open a connection", "cut one direction")
"""Additional faults for scenarios whose clients record which locks they consider held."""

FAILOVERS = ("delay replication", "kill a master", "fail over", "pause a master", "partition the master")
"""Additional faults for scenarios with three Redis servers."""

CRASHES = ("crash the store", "lose the leader", "lose unreplicated writes")
"""Additional faults for scenarios in which a single Redis crashes."""

LOSSES = ("lose writes", "flush the store")
"""Additional faults for scenarios with a single Redis, which loses acknowledged writes."""


@dataclass(slots=True)
class Scenario:
    """The parameters of one simulation. Durations are in virtual time."""

    # More than 16 fields: the seed decides each parameter independently of the others.
    seed: int
    server_count: int = 1
    wire_client_count: int = 2
    session_client_count: int = 2
    library_client_count: int = 1
    """The numbers of wire clients without sessions, of wire clients with sessions, and of clients that use the library."""
    resources: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    shared_ratio: float = 0.3
    """The share of resources that are requested in shared mode."""
    transactions: bool = True
    """True if some requests have a transaction name."""
    priorities: bool = True
    """True if some requests have a priority."""
    any_of: bool = False
    """True if some requests have `anyOf`."""
    v1_features: bool = False
    """True if clients use the features that version 1 of the protocol added; see `FIRST_V1_FEATURES_SEED`."""
    lock_kinds: bool = False
    """True if clients ask for units and subtrees; see `FIRST_LOCK_KINDS_SEED`."""
    beliefs: bool = False
    """True if library clients record which locks they consider held; see `FIRST_BELIEF_SEED`."""
    max_live_requests: int = 6
    """The maximum number of live requests of one client."""
    think_time_s: float = 0.3
    """The mean time between two actions of a client."""
    fault_phase_s: float = 20.0
    """How long clients send requests and faults are injected. Afterwards the cluster must recover."""
    faults: list[str] = field(default_factory=list)
    fault_interval_s: float = 3.0
    """The mean time between two faults."""
    slow_ratio: float = 0.02
    """The share of network segments that are delayed for long."""
    redis_count: int = 1
    """One Redis server, or three with sentinels."""
    redis_crashes: bool = False
    """True if the single Redis crashes; see `FIRST_CRASH_SEED`."""
    chunk_size: int = 1000
    """How many records a server reads from Redis at once."""
    min_replicas: int = 0
    """On how many replicas a batch must be before a client is notified of it."""
    max_lag_s: float = 0.0
    """The longest replication lag, in addition to the network delay."""


def scenario_of(seed: int) -> Scenario:
    """Return the scenario of a seed.

    Each scenario has only some of the faults, so that the faults are combined in many ways. Parameters for replicated Redis
    are drawn from a second generator, so that the scenarios of the older seeds stay the same.
    """
    if FIRST_BELIEF_SEED <= seed < FIRST_LOCK_KINDS_SEED:
        return _belief_scenario_of(seed)
    if seed >= FIRST_CRASH_SEED:
        return _crash_scenario_of(seed)
    random = Random(f"{seed} plan")
    faults = random.sample(FAULTS, random.choice([0, 1, 2, 3, 4, 6, len(FAULTS)]))
    if random.random() < 0.25:
        faults.append(random.choice(LOSSES))
    v1_features = seed >= FIRST_V1_FEATURES_SEED
    replicated = seed % 3 == 0 if v1_features else seed >= FIRST_REPLICATED_SEED
    replicated_random = Random(f"{seed} replicated")
    if replicated:
        faults = [kind for kind in faults if kind not in LOSSES]
        faults += 2 * replicated_random.sample(FAILOVERS, replicated_random.choice([1, 1, 2, 3, len(FAILOVERS)]))
    wire_client_count, session_client_count, library_client_count = random.choice(
        [(3, 0, 0), (0, 3, 0), (0, 0, 3), (2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 3, 0)]
    )
    server_count = random.choice([1, 1, 2, 3])
    if replicated:
        server_count = replicated_random.choice([1, 2, 2, 3, 3])
    if v1_features:
        any_of = seed % 2 == 0
    else:
        any_of = seed >= FIRST_ANY_OF_SEED and (not replicated or replicated_random.random() < 0.25)
    return Scenario(
        seed=seed,
        server_count=server_count,
        wire_client_count=wire_client_count,
        session_client_count=session_client_count,
        library_client_count=library_client_count,
        resources=_resources_of(seed, random.choice([1, 2, 3, 3, 4, 6])),
        shared_ratio=random.choice([0.0, 0.3, 0.6]),
        transactions=random.random() < 0.6,
        priorities=random.random() < 0.5,
        max_live_requests=random.choice([3, 6, 10]),
        think_time_s=random.choice([0.1, 0.25, 0.5]),
        fault_phase_s=random.choice([8.0, 15.0, 25.0]),
        faults=faults,
        fault_interval_s=random.choice([0.7, 1.5, 3.0]),
        slow_ratio=random.choice([0.0, 0.02, 0.1]),
        any_of=any_of,
        v1_features=v1_features,
        lock_kinds=seed >= FIRST_LOCK_KINDS_SEED,
        redis_count=3 if replicated else 1,
        min_replicas=replicated_random.choice([0, 0, 1]) if replicated else 0,
        max_lag_s=replicated_random.choice([0.0, 0.005, 0.1, 1.0]) if replicated else 0.0,
    )


def _resources_of(seed: int, count: int) -> list[str]:
    """Return the resources of a scenario: `count` names, or names of all kinds."""
    if seed < FIRST_LOCK_KINDS_SEED:
        return list("abcdef"[:count])
    random = Random(f"{seed} resources")
    names = random.sample(NAMES_OF_ALL_KINDS, min(count, len(NAMES_OF_ALL_KINDS)))
    return names + random.sample(SUBTREES, random.choice([0, 1, 1, 2, 3]))


def _belief_scenario_of(seed: int) -> Scenario:
    """Return the scenario of a seed from `FIRST_BELIEF_SEED` on.

    Half-open connections are the most frequent faults, combined with some of the other faults. No fault loses acknowledged
    writes, because then the server itself forgets a lock. There are few resources, so that a waiting client gets a lock as soon
    as the server ends the lock of another client.
    """
    random = Random(f"{seed} plan")
    faults = [*HALF_OPEN, *HALF_OPEN, *random.sample(FAULTS, random.choice([0, 1, 2, 4]))]
    replicated = seed % 4 == 0
    if replicated:
        faults += random.sample(FAILOVERS, random.choice([1, 2]))
    return Scenario(
        seed=seed,
        server_count=random.choice([1, 2, 2, 3]),
        wire_client_count=0,
        session_client_count=0,
        library_client_count=random.choice([2, 3, 4]),
        resources=list("ab"[: random.choice([1, 2, 2])]),
        shared_ratio=random.choice([0.0, 0.3]),
        transactions=random.random() < 0.3,
        priorities=False,
        beliefs=True,
        max_live_requests=random.choice([1, 2, 4]),
        think_time_s=random.choice([0.1, 0.5]),
        fault_phase_s=random.choice([15.0, 25.0, 40.0]),
        faults=faults,
        fault_interval_s=random.choice([0.7, 1.5, 3.0]),
        slow_ratio=random.choice([0.0, 0.02, 0.1]),
        redis_count=3 if replicated else 1,
        min_replicas=random.choice([0, 1]) if replicated else 0,
        max_lag_s=random.choice([0.0, 0.1]) if replicated else 0.0,
    )


def _crash_scenario_of(seed: int) -> Scenario:
    """Return the scenario of a seed from `FIRST_CRASH_SEED` on.

    Most faults are crashes of Redis. They are rare enough that a server usually leads before the next one.
    """
    random = Random(f"{seed} plan")
    wire_client_count, session_client_count, library_client_count = random.choice([(3, 0, 0), (0, 3, 0), (1, 2, 1)])
    return Scenario(
        seed=seed,
        server_count=random.choice([1, 2, 2, 2, 3, 3]),
        wire_client_count=wire_client_count,
        session_client_count=session_client_count,
        library_client_count=library_client_count,
        resources=_resources_of(seed, random.choice([2, 3, 4])),
        shared_ratio=random.choice([0.0, 0.3]),
        transactions=random.random() < 0.6,
        priorities=random.random() < 0.5,
        any_of=seed % 2 == 0,
        v1_features=True,
        lock_kinds=True,
        max_live_requests=random.choice([3, 6, 10]),
        think_time_s=random.choice([0.25, 0.5]),
        fault_phase_s=random.choice([40.0, 60.0]),
        faults=[*2 * CRASHES, *random.sample(FAULTS, random.choice([0, 0, 1, 2, 4]))],
        fault_interval_s=random.choice([6.0, 10.0]),
        slow_ratio=random.choice([0.0, 0.02]),
        redis_crashes=True,
        chunk_size=2,
    )


# -- The workload --------

NO_LIMIT_MS = 2_147_483_647
"""The `queueTimeout` that stands for an unlimited wait."""
NOTES = ("cron@host-7", "ä note with \U0001f510", "x" * 256)


@dataclass(slots=True)
class ClientContext:
    """The state that the clients of one simulation share."""

    scenario: Scenario
    addresses: list[str]
    """The addresses of the servers, as `HOST:PORT`."""
    history: ClusterHistory
    request_ids: list[int] = field(default_factory=list)
    """The ids of all requests, in the order in which clients first received them."""
    stopping: Event = field(default_factory=Event)
    """Set when the clients have to finish."""

    def recent_request_id(self, random: Random) -> int:
        """Return the id of one of the ten most recent requests of all clients, or 0 if there was no request yet."""
        return random.choice(self.request_ids[-10:]) if self.request_ids else 0


class Workload:
    """Generates random requests within the parameters of a scenario.

    `v1_random` is a second generator for the fields that only scenarios with `v1_features` have. It leaves the requests of
    all other scenarios unchanged.
    """

    def __init__(self, scenario: Scenario, random: Random, v1_random: Random | None = None) -> None:
        self.scenario = scenario
        self.random = random
        self._v1_random = v1_random if scenario.v1_features else None

    def resources(self) -> list[str]:
        """Return one to three random resources with modes: `exclusive:NAME`, `shared:NAME`, or units as `2/3:NAME`."""
        random, scenario = self.random, self.scenario
        count = min(random.choice([1, 1, 1, 2, 2, 3]), len(scenario.resources))
        return [self._lock(name) for name in random.sample(scenario.resources, count)]

    def _lock(self, name: str) -> str:
        """Return a lock on a resource in a random mode."""
        random, scenario = self.random, self.scenario
        if scenario.lock_kinds and not name.endswith("**") and random.random() < 0.4:
            limit = random.choice([2, 3, 3, 4])
            return f"{random.randint(1, limit)}/{limit}:{name}"
        return ("shared:" if random.random() < scenario.shared_ratio else "exclusive:") + name

    def transaction(self, client: str) -> str | None:
        """Return a random transaction name for a request of `client`, or None for a request without a transaction.

        Some names are used by all clients, the others only by `client`.
        """
        random, scenario = self.random, self.scenario
        if not scenario.transactions or random.random() < 0.4:
            return None
        return f"t{random.randint(1, 3)}" if random.random() < 0.3 else f"{client}-{random.randint(1, 3)}"

    def request(self, client: str) -> dict[str, Any]:
        """Return the payload of a random `request` of `client`, without its `ref`."""
        random = self.random
        if self.scenario.any_of and random.random() < 0.4:
            return self._add_v1_features(self.any_of_request(client))
        payload: dict[str, Any] = {"resources": self.resources()}
        if random.random() < 0.8:
            payload["queueTimeout"] = random.choice([0, 50, 400, 2_000, 5_000, 20_000])
        if random.random() < 0.9:
            payload["transactionTimeout"] = random.choice([20, 300, 1_000, 3_000, 12_000])
        transaction = self.transaction(client)
        if transaction is not None:
            payload["transactionName"] = transaction
        if self.scenario.priorities and random.random() < 0.3:
            payload["priority"] = random.choice([-1, 1, 5])
        if random.random() < 0.15:
            payload["onDisconnect"] = "release"
        return self._add_v1_features(payload)

    def _add_v1_features(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return the payload of a request, in scenarios with `v1_features` with random changes that use these features."""
        v1_random = self._v1_random
        if v1_random is None:
            return payload
        if v1_random.random() < 0.3:
            payload["note"] = v1_random.choice(NOTES)
        if "resources" in payload and v1_random.random() < 0.08:
            payload["queueTimeout"] = NO_LIMIT_MS
        if "anyOf" in payload and v1_random.random() < 0.5:
            # Large amounts are written as strings.
            payload["target"] = str(payload["target"] * 10**30)
            payload["weights"] = [
                str(weight * 10**30) for weight in payload.get("weights") or [1] * len(payload["anyOf"])
            ]
        return payload

    def any_of_request(self, client: str) -> dict[str, Any]:
        """Return the payload of a random `request` with `anyOf`, without its `ref`."""
        random, scenario = self.random, self.scenario
        choices = [name for name in scenario.resources if not name.endswith("**")]
        names = random.sample(choices, random.randint(1, len(choices)))
        payload: dict[str, Any] = {
            "anyOf": [self._lock(name) for name in names],
            "target": random.choice([2, 2, 4, 5]),
            "transactionTimeout": random.choice([20, 300, 1_000, 3_000, 12_000]),
        }
        if random.random() < 0.5:
            payload["weights"] = [random.choice([1, 2, 4]) for _ in names]
        else:
            payload["target"] = (payload["target"] + 1) // 2  # each resource has the default weight 1
        transaction = self.transaction(client)
        if transaction is not None:
            payload["transactionName"] = transaction
        if random.random() < 0.15:
            payload["onDisconnect"] = "release"
        return payload
