"""Replicas in processes of their own that select from the same wallets and spend what they have selected.

The ledger here knows nothing of selectors and stores: it adds up what the replicas say that they spent.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from genie.tokens import SqlTokenStore, Token
from programs import start_script
from servers import WAIT_S, Genie, Redis, running_server
from token_replica import KIND
from wire import Wire

REPLICA = Path(__file__).parent.parent / "token_replica.py"
MOST = 20

RETRIES = 240
"""With half a second before each: for as long as others may hold what is asked for."""


class Replica:
    """One that runs, or has been killed."""

    def __init__(self, genie: Genie, url: str) -> None:
        self.process = start_script(
            *(REPLICA, *map(str, genie.address), url),
            load=["sqlalchemy.ext.asyncio", "aiosqlite", "genie.tokens.sherdlock", "genie.tokens.stores.sql"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the replica has ended"
        return dict(orjson.loads(line))

    def begin(self, **job: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(orjson.dumps(job) + b"\n")
        self.process.stdin.flush()

    def done(self) -> list[dict[str, Any]]:
        """What it says of its job, to the end."""
        said = []
        while "done" not in (one := self.hear()):
            said.append(one)
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Ledger:
    """What was issued and who has spent it, by what was said."""

    issued: dict[str, int]
    spent: set[str] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)

    def enter(self, said: list[dict[str, Any]]) -> None:
        """Outputs first: a token may be spent by another before its issuer is heard."""
        said = [one for one in said if one["outcome"] != "selected"]
        for one in said:
            self.outcomes[one["outcome"]] += 1
            if one["outcome"] == "spent":
                self.issued.update(one["outputs"])
        for one in said:
            if one["outcome"] == "spent":
                for id_ in one["tokens"]:
                    assert id_ in self.issued, f"{id_} was spent, and never issued"
                    assert id_ not in self.spent, f"{id_} was spent twice"
                    self.spent.add(id_)
                worth = sum(self.issued[id_] for id_ in one["tokens"])
                assert worth == sum(one["outputs"].values()), "money was made, or lost"

    @property
    def left(self) -> dict[str, int]:
        return {id_: amount for id_, amount in self.issued.items() if id_ not in self.spent}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('tokens') / 'tokens.db'}"


@pytest.fixture(scope="module")
def replicas(genie: Genie, url: str) -> Iterator[list[Replica]]:
    """They are shared by the tests, each of which has wallets of its own."""
    running = [Replica(genie, url) for _ in range(MOST)]
    try:
        for replica in running:
            assert replica.hear() == {"ready": True}
        yield running
    finally:
        for replica in running:
            replica.kill()


async def issue(url: str, owner: str, amounts: list[int]) -> Ledger:
    tokens = [Token(f"{owner}-{number}", owner, amount=amount, **KIND) for number, amount in enumerate(amounts)]
    async with SqlTokenStore(url) as store:
        await store.add(tokens)
    return Ledger({token.id: token.amount for token in tokens})


async def unspent(url: str, *owners: str) -> dict[str, int]:
    async with SqlTokenStore(url) as store:
        return {
            token.id: token.amount for owner in owners async for page in store.unspent(owner=owner) for token in page
        }


async def play(
    url: str, replicas: list[Replica], name: str, amounts: list[int], asks: list[int], **options: Any
) -> Ledger:
    """Each replica asks for all of `asks` at once; the ledger and the store must agree in the end."""
    ledger = await issue(url, name, amounts)
    for number, replica in enumerate(replicas):
        replica.begin(name=f"{name}-r{number}", owner=name, payee=f"{name}-payee", asks=asks, options=options)
    ledger.enter([one for replica in replicas for one in replica.done()])
    assert await unspent(url, name, f"{name}-payee") == ledger.left
    assert sum(ledger.left.values()) == sum(amounts)
    return ledger


async def end_the_lease(genie: Genie, transaction: str, seconds: int) -> None:
    """Let what the transaction holds end as if its lease, which is so long, were over."""
    wire = await Wire.connect(genie.address)
    wire.send("inspect", transactionName=transaction)
    held = (await wire.expect("inspected"))["holders"]
    assert held
    for lock in held:
        assert (seconds - WAIT_S) * 1000 < lock["expiresIn"] <= seconds * 1000
        wire.send("extend", id=lock["id"], transactionTimeout=1)
        await wire.expect("extended")


async def test_one_replica_and_a_hundred_asks_with_change(url: str, replicas: list[Replica]) -> None:
    ledger = await play(url, replicas[:1], "hundred", [100] * 10, [10] * 100, retries=RETRIES, backoff=0.5)
    assert ledger.outcomes == {"spent": 100}


async def test_three_replicas_with_a_hundred_asks_each(url: str, replicas: list[Replica]) -> None:
    ledger = await play(url, replicas[:3], "three", [1] * 300, [1] * 100, retries=RETRIES, backoff=0.5)
    assert ledger.outcomes == {"spent": 300}


async def test_twenty_replicas_without_back_off(url: str, replicas: list[Replica]) -> None:
    ledger = await play(url, replicas, "twenty", [1] * 100, [1] * 5, retries=3, backoff=0.0)
    assert ledger.outcomes == {"spent": 100}


async def test_ten_replicas_for_whom_there_is_not_enough(url: str, replicas: list[Replica]) -> None:
    """Forty asks of 3 from fifty tokens of 2: 100 in all, so thirty-three can be had, and what change allows."""
    ledger = await play(url, replicas[:10], "ten", [2] * 50, [3] * 4, retries=RETRIES, backoff=0.5)
    assert ledger.outcomes["spent"] == 100 // 3
    assert ledger.outcomes["InsufficientFunds"] == 40 - 100 // 3
    assert ledger.outcomes.total() == 40


async def test_two_replicas_that_need_what_only_one_can_have(url: str, replicas: list[Replica]) -> None:
    ledger = await play(url, replicas[:2], "two", [3, 3], [4], retries=RETRIES, backoff=0.5)
    assert ledger.outcomes == {"spent": 1, "InsufficientFunds": 1}


async def test_a_replica_that_is_killed_with_tokens_held(genie: Genie, url: str, replicas: list[Replica]) -> None:
    ledger = await issue(url, "killed", [1] * 10)
    victim = Replica(genie, url)
    try:
        assert victim.hear() == {"ready": True}
        victim.begin(name="victim", owner="killed", asks=[6], hold=True, options={"lease": 1000})
        assert victim.hear()["outcome"] == "selected"
    finally:
        victim.kill()
    replicas[0].begin(name="too-soon", owner="killed", asks=[10], options={"retries": 0})
    (said,) = replicas[0].done()
    assert (said["outcome"], said["free"], said["locked"]) == ("FundsLocked", 4, 6)
    await end_the_lease(genie, "victim-0", 1000)
    replicas[1].begin(name="heir", owner="killed", asks=[10], options={"retries": RETRIES, "backoff": 0.5})
    ledger.enter(replicas[1].done())
    assert ledger.outcomes == {"spent": 1}
    assert len(ledger.spent) == 10


async def test_the_server_is_restarted_in_mid_selection(redis: Redis, tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'tokens.db'}"
    with running_server(redis) as genie:
        running = [Replica(genie, url) for _ in range(3)]
        try:
            for replica in running:
                assert replica.hear() == {"ready": True}
            ledger = await issue(url, "restart", [1] * 300)
            for number, replica in enumerate(running):
                options = {"retries": RETRIES, "backoff": 0.5}
                replica.begin(name=f"r{number}", owner="restart", asks=[1] * 100, options=options)
            first = running[0].hear()
            assert first["outcome"] == "selected"
            genie.kill()
            genie.start()
            said = [one for replica in running for one in replica.done()]
            ledger.enter([first, *said])
        finally:
            for replica in running:
                replica.kill()
    assert ledger.outcomes == {"spent": 300}
    assert await unspent(url, "restart", "payee") == ledger.left
