"""A service in simulated worlds: faults of every kind, the same for the same seed, found and shrunk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import genie
from genie.testing import Fault, Kind, Violation, explore, note, process, random_faults, run
from genie.testing.explore import run_once
from genie.testing.timeline import as_text

Result = tuple[int, int]


class Database:
    """A balance in a simulated database: a write arrives after a while, even if its sender has given up."""

    def __init__(self, *, checks_fence: bool) -> None:
        self.balance = self.fence = 0
        self._checks_fence = checks_fence

    async def write(self, balance: int, fence: int) -> None:
        loop = asyncio.get_running_loop()
        answered = loop.create_future()

        def arrive() -> None:
            accepted = not self._checks_fence or fence >= self.fence
            if accepted:
                self.balance, self.fence = balance, fence
            if not answered.done():
                answered.set_result(accepted)

        loop.call_later(random.uniform(0.001, 0.3), arrive)  # noqa: S311
        if not await answered:
            raise PermissionError("stale fence")


def bank(*, checks_fence: bool, deposits: int = 12) -> Callable[[], Coroutine[Any, Any, Result]]:
    """Return a service whose two replicas make deposits. It gives the final balance, and the number of deposits."""

    async def replica(name: str, database: Database, done: dict[str, int]) -> None:
        while done[name] < deposits:
            try:
                async with genie.connect() as client:
                    while done[name] < deposits:
                        async with client.lock("account", transaction_timeout=2.0) as lock:
                            balance = database.balance
                            note(f"read {balance}")
                            await asyncio.sleep(0.1)
                            await database.write(balance + 1, lock.fence)
                            note(f"wrote {balance + 1}")
                            done[name] += 1
            except (genie.GenieError, PermissionError) as error:
                note(f"failed: {type(error).__name__}")
                await asyncio.sleep(0.2)

    async def main() -> Result:
        database, done = Database(checks_fence=checks_fence), {"one": 0, "two": 0}
        await asyncio.gather(*(process(name, replica, name, database, done) for name in done))
        return database.balance, sum(done.values())

    return main


def no_deposit_is_lost(result: Result) -> None:
    balance, deposits = result
    assert balance >= deposits, f"{deposits} deposits, but the balance is {balance}"


def pauses(seed: int) -> list[Fault]:
    return random_faults(seed, count=4, during_s=8, kinds=[Kind.PAUSE_PROCESS])


def test_a_service_that_forgets_its_fence_is_found_and_its_timeline_explains_it(tmp_path: Path) -> None:
    with pytest.raises(Violation) as caught:
        explore(
            bank(checks_fence=False),
            no_deposit_is_lost,
            seeds=200,
            plan=pauses,
            processes=2,
            page=tmp_path / "page.html",
            progress=None,
        )
    violation = caught.value
    assert 1 <= len(violation.faults) <= 4
    assert {fault.kind for fault in violation.faults} == {Kind.PAUSE_PROCESS}
    assert {fault.target for fault in violation.faults} <= {"one", "two"}
    fault = violation.faults[-1]
    assert isinstance(violation.error, AssertionError)
    kinds = [(line.process, line.kind) for line in violation.timeline]
    paused = len(kinds) - 1 - kinds[::-1].index((fault.target, "fault"))
    other = {"one": "two", "two": "one"}[fault.target]
    texts = [line.text for line in violation.timeline[paused:]]
    ended = texts.index("the server ended exclusive:account: transaction-timeout")
    assert (other, "lock") in kinds[paused + ended :]
    message = str(violation)
    assert message.startswith(f"seed {violation.seed}: AssertionError: 24 deposits, but the balance is ")
    assert f"    {fault!r},\n" in message
    page = (tmp_path / "page.html").read_text()
    assert page.count("<tr>") == len(violation.timeline) + 1
    again = run_once(bank(checks_fence=False), no_deposit_is_lost, violation.seed, violation.faults)
    assert as_text(again.lines) == as_text(violation.timeline)


def test_the_same_service_with_fences_passes() -> None:
    progress = StringIO()
    explore(bank(checks_fence=True), no_deposit_is_lost, seeds=20, processes=1, progress=progress)
    assert progress.getvalue() == ""


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_of_fault_is_injected_and_survived(kind: Kind) -> None:
    target = "s1" if kind in (Kind.CRASH_SERVER, Kind.PAUSE_SERVER) else "" if "redis" in kind else "0"
    plan = [Fault(at_s, kind, target, 1.5) for at_s in (0.5, 1.0, 4.0)]
    outcome = run_once(bank(checks_fence=True, deposits=6), no_deposit_is_lost, 3, plan)
    assert outcome.error is None
    faults = [line for line in outcome.lines if line.kind == "fault"]
    assert faults
    assert all(line.text.startswith(kind.value) for line in faults)
    assert as_text(run_once(bank(checks_fence=True, deposits=6), None, 3, plan).lines) == as_text(outcome.lines)


async def saga(accounts: dict[str, int], *, finished: set[str]) -> None:
    """Move money in two steps. After a crash in between, it starts again as if nothing had happened."""
    async with genie.connect() as client, client.lock("accounts", transaction_timeout=5.0):
        if "saga" not in finished:
            accounts["from"] -= 1
            await asyncio.sleep(0.2)
            accounts["to"] += 1
            finished.add("saga")


async def run_saga() -> int:
    accounts = {"from": 10, "to": 0}
    await process("worker", lambda: saga(accounts, finished=set()))
    return sum(accounts.values())


def test_a_saga_without_rollback_is_found() -> None:
    def money_is_kept(total: int) -> None:
        assert total == 10

    def crashes(seed: int) -> list[Fault]:
        return random_faults(seed, count=3, during_s=1, kinds=[Kind.CRASH_PROCESS])

    with pytest.raises(Violation, match="crash process"):
        explore(run_saga, money_is_kept, seeds=50, plan=crashes, processes=1, progress=None)


def test_a_plan_is_shrunk_to_what_the_failure_needs() -> None:
    """The service fails if it was paused for more than a second: one pause is enough, and 1.5 s is the shortest duration."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(100):
            before = loop.time()
            await asyncio.sleep(0.1)
            assert loop.time() - before < 1.2

    plan = [
        *(
            Fault(at_s, kind, "", 4.0)
            for at_s, kind in ((0.5, "pause redis"), (1.0, "roll back redis"), (8.0, "pause redis"))
        ),
        *(Fault(at_s, "pause process", "3", 12.0) for at_s in (2.0, 20.0, 40.0)),
        Fault(3.0, "crash server", "s2", 4.0),
    ]
    with pytest.raises(Violation) as caught:
        explore(main, seeds=1, plan=lambda _: plan, progress=None)
    (fault,) = caught.value.faults
    assert (fault.kind, fault.target, fault.duration_s) == (Kind.PAUSE_PROCESS, "main", 1.5)


def test_a_plan_is_python_source() -> None:
    plan = random_faults(7, count=100)
    assert plan == random_faults(7, count=100)
    assert {fault.kind for fault in plan} == set(Kind)
    assert eval(repr(plan), {"Fault": Fault}) == plan  # noqa: S307


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "explode", "0"), "kind must be one of pause process, "),
        ((-1, "pause redis"), "at_s and duration_s must be seconds"),
        ((0, "pause process"), "pause process needs a target"),
        ((0, "pause redis", "0"), "pause redis has no target"),
    ],
)
def test_an_invalid_fault_is_rejected(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault(*arguments)


def test_without_a_simulated_world_processes_and_notes_do_nothing() -> None:
    async def main() -> int:
        note("ignored")

        async def answer(number: int) -> int:
            return number

        return await process("p", answer, 7)

    assert asyncio.run(main()) == run(main(), faults=[]) == 7


@pytest.mark.genie_explore(seeds=3, processes=1, progress=None)
async def test_the_marker_runs_the_test_in_simulated_worlds() -> None:
    async with genie.connect() as client, client.lock("a"):
        note("held")
