"""Replicas in separate processes that select from the same wallets and spend the selected tokens.

The ledger is independent of selectors and stores: it sums up the spends that the replicas report.
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

from genie_tokens import SqlTokenStore, Token
from support.network.wire import Wire
from support.processes.programs import start_script
from support.processes.servers import WAIT_S, Genie, Redis, running_server
from token_replica import KIND

REPLICA = Path(__file__).parent.parent / "token_replica.py"
REPLICA_COUNT = 20

RETRIES = 240
"""With a backoff of up to half a second: longer than other replicas hold the requested tokens."""


class Replica:
    """The process of a replica."""

    def __init__(self, genie: Genie, url: str) -> None:
        self.process = start_script(
            *(REPLICA, *map(str, genie.address), url),
            load=["sqlalchemy.ext.asyncio", "aiosqlite", "genie_tokens.sherdlock", "genie_tokens.stores.sql"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def read_report(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the replica has ended"
        return dict(orjson.loads(line))

    def send_job(self, **job: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(orjson.dumps(job) + b"\n")
        self.process.stdin.flush()

    def read_reports(self) -> list[dict[str, Any]]:
        """Return the reports of a job, when it has ended."""
        reports = []
        while "done" not in (report := self.read_report()):
            reports.append(report)
        return reports

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Ledger:
    """Issued and spent tokens, as the replicas have reported them."""

    issued: dict[str, int]
    spent: set[str] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)

    def record(self, reports: list[dict[str, Any]]) -> None:
        """Record reports, outputs first: a token may be spent before the report of its issuer is read."""
        reports = [report for report in reports if report["outcome"] != "selected"]
        for report in reports:
            self.outcomes[report["outcome"]] += 1
            if report["outcome"] == "spent":
                self.issued.update(report["outputs"])
        for report in reports:
            if report["outcome"] == "spent":
                for id_ in report["tokens"]:
                    assert id_ in self.issued, f"{id_} was spent, and never issued"
                    assert id_ not in self.spent, f"{id_} was spent twice"
                    self.spent.add(id_)
                worth = sum(self.issued[id_] for id_ in report["tokens"])
                assert worth == sum(report["outputs"].values()), "the outputs have another sum than the spent tokens"

    @property
    def left(self) -> dict[str, int]:
        return {id_: amount for id_, amount in self.issued.items() if id_ not in self.spent}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('tokens') / 'tokens.db'}"


@pytest.fixture(scope="module")
def replicas(genie: Genie, url: str) -> Iterator[list[Replica]]:
    """Start the replicas, which all tests share; each test uses its own wallets."""
    running = [Replica(genie, url) for _ in range(REPLICA_COUNT)]
    try:
        for replica in running:
            assert replica.read_report() == {"ready": True}
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


async def run_replicas(
    url: str, replicas: list[Replica], name: str, amounts: list[int], requests: list[int], **options: Any
) -> Ledger:
    """Let each replica select all `requests` concurrently; check that the ledger and the store agree in the end."""
    ledger = await issue(url, name, amounts)
    for number, replica in enumerate(replicas):
        replica.send_job(
            name=f"{name}-r{number}", owner=name, payee=f"{name}-payee", requests=requests, options=options
        )
    ledger.record([report for replica in replicas for report in replica.read_reports()])
    assert await unspent(url, name, f"{name}-payee") == ledger.left
    assert sum(ledger.left.values()) == sum(amounts)
    return ledger


async def expire_locks(genie: Genie, transaction: str, seconds: int) -> None:
    """Let the locks of a transaction expire now, whose lease ends in `seconds`."""
    wire = await Wire.connect(genie.address)
    wire.send("inspect", transactionName=transaction)
    held = (await wire.expect("inspected"))["holders"]
    assert held
    for lock in held:
        assert (seconds - WAIT_S) * 1000 < lock["expiresIn"] <= seconds * 1000
        wire.send("extend", id=lock["id"], transactionTimeout=1)
        await wire.expect("extended")


async def test_one_replica_with_a_hundred_selections_and_change(url: str, replicas: list[Replica]) -> None:
    ledger = await run_replicas(url, replicas[:1], "hundred", [100] * 10, [10] * 100, retries=RETRIES, backoff=0.5)
    assert ledger.outcomes == {"spent": 100}


async def test_three_replicas_with_a_hundred_selections_each(url: str, replicas: list[Replica]) -> None:
    ledger = await run_replicas(url, replicas[:3], "three", [1] * 300, [1] * 100, retries=RETRIES, backoff=0.5)
    assert ledger.outcomes == {"spent": 300}


async def test_twenty_replicas_without_back_off(url: str, replicas: list[Replica]) -> None:
    ledger = await run_replicas(url, replicas, "twenty", [1] * 100, [1] * 5, retries=3, backoff=0.0)
    assert ledger.outcomes == {"spent": 100}


async def test_ten_replicas_with_insufficient_funds(url: str, replicas: list[Replica]) -> None:
    """Forty requests of 3 for fifty tokens of 2: their sum is 100, so 33 requests succeed."""
    ledger = await run_replicas(url, replicas[:10], "ten", [2] * 50, [3] * 4, retries=RETRIES, backoff=0.5)
    assert ledger.outcomes["spent"] == 100 // 3
    assert ledger.outcomes["InsufficientFunds"] == 40 - 100 // 3
    assert ledger.outcomes.total() == 40


async def test_two_replicas_that_compete_for_the_same_tokens(url: str, replicas: list[Replica]) -> None:
    ledger = await run_replicas(url, replicas[:2], "two", [3, 3], [4], retries=RETRIES, backoff=0.5)
    assert ledger.outcomes == {"spent": 1, "InsufficientFunds": 1}


async def test_tokens_of_a_killed_replica_are_free_after_the_lease(
    genie: Genie, url: str, replicas: list[Replica]
) -> None:
    ledger = await issue(url, "killed", [1] * 10)
    victim = Replica(genie, url)
    try:
        assert victim.read_report() == {"ready": True}
        victim.send_job(name="victim", owner="killed", requests=[6], hold=True, options={"lease": 1000})
        assert victim.read_report()["outcome"] == "selected"
    finally:
        victim.kill()
    replicas[0].send_job(name="too-soon", owner="killed", requests=[10], options={"retries": 0})
    (report,) = replicas[0].read_reports()
    assert (report["outcome"], report["free"], report["locked"]) == ("FundsLocked", 4, 6)
    await expire_locks(genie, "victim-0", 1000)
    replicas[1].send_job(name="heir", owner="killed", requests=[10], options={"retries": RETRIES, "backoff": 0.5})
    ledger.record(replicas[1].read_reports())
    assert ledger.outcomes == {"spent": 1}
    assert len(ledger.spent) == 10


async def test_selections_continue_after_a_restart_of_the_server(redis: Redis, tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'tokens.db'}"
    with running_server(redis) as genie:
        running = [Replica(genie, url) for _ in range(3)]
        try:
            for replica in running:
                assert replica.read_report() == {"ready": True}
            ledger = await issue(url, "restart", [1] * 300)
            for number, replica in enumerate(running):
                options = {"retries": RETRIES, "backoff": 0.5}
                replica.send_job(name=f"r{number}", owner="restart", requests=[1] * 100, options=options)
            first = running[0].read_report()
            assert first["outcome"] == "selected"
            genie.kill()
            genie.start()
            reports = [report for replica in running for report in replica.read_reports()]
            ledger.record([first, *reports])
        finally:
            for replica in running:
                replica.kill()
    assert ledger.outcomes == {"spent": 300}
    assert await unspent(url, "restart", "payee") == ledger.left
