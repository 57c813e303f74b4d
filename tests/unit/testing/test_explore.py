"""A service in simulated worlds: faults of every kind, the same for the same seed, found and shrunk."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import genie
from genie.pytest_plugin import pytest_pyfunc_call
from genie.testing import (
    Fault,
    Kind,
    Violation,
    assert_lock_order,
    explore,
    note,
    process,
    random_faults,
    run,
    set_lock_order_rules,
)
from genie.testing.explore import Run, run_once
from genie.testing.faults import PROCESS_KINDS, SERVER_KINDS
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
            seeds=20,
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
    explore(bank(checks_fence=True), no_deposit_is_lost, seeds=12, processes=1, progress=progress)
    assert progress.getvalue() == ""


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_of_fault_is_injected_and_survived(kind: Kind) -> None:
    target = "s1" if kind in SERVER_KINDS else "0" if kind in PROCESS_KINDS else ""
    delay_s = 1.0 if kind is Kind.DELAY_MESSAGES else 0.0
    plan = [Fault(at_s, kind, target, 1.5, delay_s) for at_s in (0.5, 1.0, 4.0)]
    outcome = run_once(bank(checks_fence=True, deposits=6), no_deposit_is_lost, 3, plan)
    assert outcome.error is None
    faults = [line for line in outcome.lines if line.kind == "fault"]
    assert faults
    assert all(line.text.startswith(kind.value) for line in faults)
    assert as_text(run_once(bank(checks_fence=True, deposits=6), None, 3, plan).lines) == as_text(outcome.lines)


def test_the_leader_loses_its_lease_without_being_paused_or_crashed() -> None:
    def run_plan(faults: list[Fault]) -> Run:
        return run_once(bank(checks_fence=True), no_deposit_is_lost, 3, faults)

    outcome = run_plan([Fault(1.0, "lose lease", "", 4.0)])
    assert outcome.error is None
    lines = [line for line in outcome.lines if line.process in ("s1", "s2", "s3")]
    cut_off, successor, superseded = sorted(lines, key=lambda line: (line.kind != "fault", line.text))
    assert [line.text for line in (cut_off, successor, superseded)] == [
        "lose lease cut off from redis until 4.0 s after another server leads",
        "leadership acquired",
        "leadership lost",
    ]
    assert (cut_off.at_s, cut_off.kind, cut_off.process) == (1.0, "fault", superseded.process)
    assert successor.process != cut_off.process
    assert cut_off.at_s + 2.0 < min(successor.at_s, superseded.at_s), "the lease is 3 s, of which up to 1 s had passed"
    holds = [line.at_s for line in outcome.lines if line.text.startswith("holds")]
    assert not [at_s for at_s in holds if cut_off.at_s + 0.2 < at_s < successor.at_s], "the leader grants nothing"
    assert [at_s for at_s in holds if at_s > successor.at_s]
    assert outcome.faults == [Fault(1.0, "lose lease", "", 4.0)]
    assert as_text(run_plan(outcome.faults).lines) == as_text(outcome.lines)
    assert not [line for line in run_plan([]).lines if line.process in ("s1", "s2", "s3")], (
        "s1, s2 and s3 keep their roles"
    )


def test_a_lease_is_lost_only_while_a_server_leads() -> None:
    crashes = [Fault(0.5, "crash server", name, 60.0) for name in ("s1", "s2", "s3")]
    outcome = run_once(partial(asyncio.sleep, 3.0), None, 3, [*crashes, Fault(1.0, "lose lease", "", 4.0)])
    assert outcome.error is None
    assert outcome.faults == crashes


async def measure(process_name: str, took_s: dict[str, list[float]]) -> None:
    """Lock and release ten times, and record how long each takes."""
    loop = asyncio.get_running_loop()
    async with genie.connect() as client:
        for number in range(10):
            began = loop.time()
            async with client.lock(f"{process_name} {number}", transaction_timeout=60):
                pass
            took_s[process_name].append(loop.time() - began)
            await asyncio.sleep(0.5)


async def measure_both() -> dict[str, list[float]]:
    took_s: dict[str, list[float]] = {"one": [], "two": []}
    await asyncio.gather(*(process(name, measure, name, took_s) for name in took_s))
    return took_s


@pytest.mark.parametrize(
    ("target", "late", "column"),
    [
        ("", {"one", "two"}, "network"),
        ("one", {"one"}, "one"),
        ("1", {"two"}, "two"),
        ("redis", {"one", "two"}, "redis"),
    ],
)
def test_messages_are_late_for_a_time(target: str, late: set[str], column: str) -> None:
    took_s: dict[str, list[float]] = {}
    outcome = run_once(measure_both, took_s.update, 3, [Fault(1.2, "delay messages", target, 1.5, 1.0)])
    assert outcome.error is None
    for name, each_s in took_s.items():
        assert (max(each_s) > 0.5) == (name in late), (name, each_s)  # a message is late by 0.5 s to 1 s
        assert max(*each_s[:2], *each_s[-2:]) < 0.5, (name, each_s)  # before and afterwards
    (line,) = [line for line in outcome.lines if line.kind == "fault"]
    assert (round(line.at_s, 6), line.process) == (1.2, column)
    assert line.text.startswith("delay messages ")
    assert line.text.endswith(" by up to 1.0 s, for 1.5 s")
    again = run_once(measure_both, None, 3, outcome.faults)
    assert as_text(again.lines) == as_text(outcome.lines)


def test_messages_are_late_between_two_parties() -> None:
    """Process `one` is connected to the leader only, so that its messages with one server are late, and with two are not."""
    slow: list[str] = []
    for server in ("s1", "s2", "s3"):
        took_s: dict[str, list[float]] = {}
        outcome = run_once(measure_both, took_s.update, 3, [Fault(1.2, "delay messages", f"0,{server}", 1.5, 1.0)])
        assert outcome.error is None
        (fault,) = outcome.faults
        assert fault == Fault(1.2, "delay messages", f"one,{server}", 1.5, 1.0)
        assert outcome.lines[0].process != "network"
        slow += [f"{name} {server}" for name in took_s if max(took_s[name]) > 0.5]
    (only,) = slow
    assert only.startswith("one ")


def test_late_messages_do_not_change_the_other_delays_of_the_seed() -> None:
    def lines(faults: list[Fault]) -> str:
        return as_text([line for line in run_once(measure_both, None, 3, faults).lines if line.kind != "fault"])

    assert lines([Fault(0.0, "delay messages", "s9x", 9.0, 1.0)]) == lines([]), "no such party"
    assert lines([Fault(0.0, "delay messages", "one", 0.0, 1.0)]) == lines([]), "no time"


def test_late_messages_are_shrunk_to_the_delay_that_the_failure_needs() -> None:
    def is_fast(took_s: dict[str, list[float]]) -> None:
        assert max(took_s["two"]) < 1.05  # a request and its reply, each up to 0.2 s late, take less

    plan = [
        Fault(0.3, "delay messages", "one", 4.0, 2.0),
        Fault(1.2, "delay messages", "two", 12.0, 2.0),
        Fault(2.0, "lose lease", "", 0.05),
    ]
    with pytest.raises(Violation) as caught:
        explore(measure_both, is_fast, seeds=1, plan=lambda _: plan[:2], progress=None)
    (fault,) = caught.value.faults
    assert (fault.kind, fault.target, fault.delay_s) == (Kind.DELAY_MESSAGES, "two", 1.0)
    assert fault.duration_s < 12.0
    with pytest.raises(Violation) as caught:
        explore(measure_both, is_fast, seeds=1, plan=lambda _: plan[::2], progress=None)
    (fault,) = caught.value.faults
    assert (fault.kind, fault.duration_s) == (Kind.LOSE_LEASE, 0.05)


def test_the_end_of_one_partition_does_not_end_another() -> None:
    took_s: dict[str, list[float]] = {}
    plan = [
        Fault(1.0, "partition", "one", 6.0),
        Fault(1.1, "partition", "one", 1.0),
        Fault(1.2, "partition", "two", 0.5),
    ]
    outcome = run_once(measure_both, took_s.update, 3, plan)
    assert outcome.error is None
    assert max(took_s["one"]) > 5.0
    assert 0.3 < max(took_s["two"]) < 3.0


async def fail_in_pytest() -> None:
    pytest.fail("wrong")


async def miss_an_exception() -> None:
    with pytest.raises(KeyError):
        note("no KeyError")


async def exit_with_status() -> None:
    sys.exit(3)


async def cancel_itself() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("main", [fail_in_pytest, miss_an_exception, exit_with_status, cancel_itself])
@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_that_is_no_exception_is_a_violation(
    main: Callable[[], Coroutine[Any, Any, None]], processes: int
) -> None:
    with pytest.raises(Violation, match="seed 0: "):
        explore(main, seeds=20, processes=processes, progress=None)


@pytest.mark.genie_explore(seeds=1, progress=None)
async def test_the_marker_skips_a_test_that_skips_itself() -> None:
    pytest.skip("this is the test: it is neither passed nor failed")


def test_the_timeline_names_the_locks_of_several_clients_of_a_process() -> None:
    async def hold(client: genie.Client, name: str) -> None:
        async with client.lock(name):
            await asyncio.sleep(1)

    async def main() -> None:
        async with genie.connect() as one, genie.connect() as other:
            await asyncio.gather(hold(one, "A"), hold(other, "B"))

    texts = [line.text.partition(",")[0] for line in run_once(main, None, 1, []).lines]
    assert sorted(texts) == [f"{what} exclusive:{name}" for what in ("holds", "released") for name in ("A", "B")]


def test_every_note_is_in_the_timeline() -> None:
    async def main() -> None:
        note("exit status 1 of a tool")
        note(ValueError("an object"))  # type: ignore[arg-type]
        note("two\nlines")

    lines = run_once(main, None, 1, []).lines
    assert [line.text for line in lines] == ["exit status 1 of a tool", "an object", "two\nlines"]
    *_, first, second = as_text(lines).splitlines()
    assert (first[19:], second[19:]) == ("two", "lines")
    assert second[:19].isspace()


@pytest.mark.parametrize("faults", [None, []])
def test_random_numbers_of_the_system_depend_on_the_seed(faults: list[Fault] | None) -> None:
    async def main() -> list[object]:
        system = random.SystemRandom()
        return [uuid.uuid4(), os.urandom(8), secrets.token_hex(8), secrets.randbelow(1 << 64), system.random()]

    first, again, other = (run(main(), seed=seed, faults=faults) for seed in (1, 1, 2))
    assert first == again
    assert not set(first) & set(other)
    assert os.urandom(8) != os.urandom(8) != random.Random(1).randbytes(8)  # noqa: S311


@pytest.mark.parametrize("name", ["", "main", "network", "redis", "s1", "7", "a,b", " a"])
def test_the_name_of_a_process_cannot_be_that_of_another_target(name: str) -> None:
    with pytest.raises(ValueError, match="the name of a process must not be main, "):
        run(process(name, asyncio.sleep, 0), faults=[])


def test_processes_that_run_at_the_same_time_have_different_names() -> None:
    async def main() -> None:
        await process("worker", asyncio.sleep, 1)
        await asyncio.gather(*(process("worker", asyncio.sleep, 1) for _ in range(2)))

    with pytest.raises(ValueError, match="the process 'worker' is running already"):
        run(main(), faults=[])


def test_a_process_ends_with_its_function() -> None:
    ticks: list[float] = []
    closed: list[bool] = []

    async def tick() -> None:
        while True:
            ticks.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed.append(await reader.read() == b"")
        writer.close()

    async def worker() -> None:
        background.append(asyncio.create_task(tick()))
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, "db", 5432)
        await asyncio.sleep(3.5)

    background: list[asyncio.Task[None]] = []

    async def main() -> None:
        await asyncio.start_server(serve, "db", 5432)
        await process("worker", worker)
        await asyncio.sleep(10)

    outcome = run_once(main, None, 1, [Fault(8.0, "pause process", "worker", 1.0)])
    assert outcome.error is None
    assert len(ticks) == 4
    assert closed == [True]
    assert outcome.faults == [], "a process that has ended cannot be paused"


def test_a_number_names_the_same_process_after_a_crash() -> None:
    async def main() -> None:
        await asyncio.gather(*(process(name, asyncio.sleep, 10) for name in ("one", "two")))

    plan = [Fault(1.0, "crash process", "0", 0.5), Fault(3.0, "pause process", "0", 0.5)]
    assert [fault.target for fault in run_once(main, None, 1, plan).faults] == ["one", "one"]


def test_a_process_that_is_cancelled_ends_before_its_caller_continues() -> None:
    ended: list[str] = []

    async def worker() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1)
            ended.append("worker")

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await process("worker", worker)
        ended.append("main")

    run(main(), faults=[])
    assert ended == ["worker", "main"]


def test_a_fault_of_genie_leaves_the_connections_to_simulated_dependencies() -> None:
    """A database of the service listens in the simulated network, and keeps its connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    async def worker() -> int:
        reader, writer = await asyncio.open_connection("db", 5432)
        async with genie.connect() as client, client.lock("account"):
            for number in range(20):
                writer.write(f"{number}\n".encode())
                assert await reader.readline() == f"{number}\n".encode()
                await asyncio.sleep(0.1)
        writer.close()
        return number

    async def main() -> int:
        async with await asyncio.start_server(serve, "db", 5432):
            return await process("worker", worker)

    outcome = run_once(main, None, 1, [Fault(0.7, "cut connections", "worker", 1.0)])
    assert outcome.error is None
    assert [fault.target for fault in outcome.faults] == ["worker"]


@pytest.mark.parametrize("faults", [None, []])
def test_a_blocking_client_is_rejected(faults: list[Fault] | None) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="blocking sockets are not simulated"):
            socket.create_connection(("redis", 6379))
        with genie.sync.connect():
            pass

    with pytest.raises(RuntimeError, match="blocking sockets are not simulated"):
        run(main(), faults=faults)


@pytest.mark.parametrize("faults", [None, [], [Fault(0.5, "lose lease", "", 1.0)]])
def test_the_lock_order_of_every_run_is_asserted(faults: list[Fault] | None) -> None:
    async def take(client: genie.Client, first: str, second: str) -> None:
        async with client.lock(first, transaction=f"T {first}"), client.lock(second, transaction=f"T {first}"):
            pass

    async def main() -> None:
        async with genie.connect() as client:
            await take(client, "a", "b")
            await asyncio.sleep(10)  # another server may lead afterwards
            await take(client, "b", "a")

    set_lock_order_rules("")  # forget what other tests have done
    run(main(), faults=faults)
    with pytest.raises(AssertionError, match="b and a are locked in both orders"):
        assert_lock_order()


def test_each_inversion_is_reported_once_for_the_test_that_completed_it() -> None:
    async def take(transaction: str, first: str, second: str) -> None:
        async with (
            genie.connect() as client,
            client.lock(first, transaction=transaction),
            client.lock(second, transaction=transaction),
        ):
            pass

    set_lock_order_rules("")
    for _ in range(2):
        run(take("pay-1", "a", "b"))
        assert_lock_order()
    run(take("ship-1", "b", "a"))
    with pytest.raises(AssertionError, match=r"b and a are locked in both orders:\n +ship-1 held exclusive:b"):
        assert_lock_order()
    for transaction, first, second in [("pay-2", "a", "b"), ("ship-2", "b", "a")]:
        run(take(transaction, first, second))
        assert_lock_order()
    run(take("refund-1", "b", "a"))
    with pytest.raises(AssertionError, match=r"both orders, also by refund-\*:\n +refund-1 held exclusive:b"):
        assert_lock_order()


def test_main_must_return_a_coroutine() -> None:
    with pytest.raises(Violation, match="TypeError: main must return a coroutine, as an async function does, not 5"):
        explore(lambda: 5, seeds=1, progress=None)  # type: ignore[arg-type,return-value]


def test_the_marker_needs_an_async_function() -> None:
    def test_it() -> None:
        pass

    item = SimpleNamespace(
        obj=test_it,
        name="test_it",
        funcargs={},
        get_closest_marker=lambda _name: pytest.mark.genie_explore(seeds=1).mark,
    )
    with pytest.raises(TypeError, match="needs an async test function, which test_it is not"):
        pytest_pyfunc_call(cast("pytest.Function", item))


def test_explore_is_rejected_in_a_running_event_loop() -> None:
    async def main() -> None:
        explore(run_saga, seeds=1, progress=None)

    with pytest.raises(RuntimeError, match=r"explore\(\) can't be called from a running event loop"):
        asyncio.run(main())


def test_progress_is_printed_to_the_standard_error_output_of_the_moment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(explore.__globals__, "run_once", lambda *_: Run(None, [], []))
    explore(bank(checks_fence=True), seeds=100, processes=1)
    assert capsys.readouterr().err == "100 of 100 seeds\n"


def test_open_connections_of_dependencies_give_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read()

    async def main() -> None:
        await asyncio.start_server(serve, "db", 5432)
        _, writer = await asyncio.open_connection("db", 5432)
        writers.append(writer)
        await asyncio.sleep(1)

    run(main(), faults=[])
    closing = [writer.is_closing() for writer in writers]
    assert closing == [True, True]
    writers.clear()
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "loop is closed" in str(warning.message)] == []


def test_the_lock_order_of_a_server_is_asserted_as_often_as_wanted() -> None:
    async def take(client: genie.Client, *names: str) -> None:
        async with client.lock(names[0], transaction="T"), client.lock(names[1], transaction="T"):
            pass

    async def main() -> None:
        async with genie.connect() as client:
            for rules, inversion in (
                ("", "bob and alice are locked in both orders"),
                ("", "bob and alice are locked in both orders"),
                ("*", "names of \\* are not locked in ascending order"),
            ):
                set_lock_order_rules(rules)
                await take(client, "alice", "bob")
                assert_lock_order()
                await take(client, "alice", "bob")
                await take(client, "bob", "alice")
                with pytest.raises(AssertionError, match=inversion):
                    assert_lock_order()

    try:
        run(main())
    finally:
        set_lock_order_rules("")


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
    plans = [random_faults(seed) for seed in range(200)]
    assert {fault.kind for each in plans for fault in each} == set(Kind)
    assert {len({fault.kind for fault in each}) for each in plans} >= {1, 2, 3, 6}
    assert {max(fault.at_s for fault in each) < 3 for each in plans} == {True, False}
    late = [fault for fault in random_faults(7, count=500, kinds=[Kind.DELAY_MESSAGES]) if fault.delay_s]
    assert {"", "redis", "s1", "s2", "s3"} < {fault.target for fault in late}
    assert {fault.delay_s for fault in late} == {0.2, 1.0, 5.0}
    assert eval(repr(plan), {"Fault": Fault}) == plan  # noqa: S307


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "explode", "0"), "kind must be one of pause process, "),
        ((-1, "pause redis"), "at_s and duration_s must be seconds"),
        ((0, "pause process"), "pause process needs a target"),
        ((0, "pause redis", "0"), "pause redis must have no target, not '0'"),
        ((0, "lose lease", "s1"), "lose lease must have no target, not 's1'"),
        ((0, "crash server", "s4"), "target of crash server must be one of s1, s2, s3, not 's4'"),
        ((0, "delay messages", "", 1.0), "delay_s of delay messages must be more than 0, not 0.0"),
        ((0, "delay messages", "", 1.0, float("inf")), "delay_s of delay messages must be more than 0, not inf"),
        ((0, "delay messages", "a,b,c", 1.0, 1.0), "target of delay messages must be at most two names, not 'a,b,c'"),
        ((0, "delay messages", "a,", 1.0, 1.0), "target of delay messages must be at most two names, not 'a,'"),
        ((0, "pause redis", "", 1.0, 1.0), "delay_s of pause redis must be 0, not 1.0"),
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


PROGRAM = """
import asyncio, os, sys
from genie.testing import explore

async def main():
    if os.getpid() not in known:
        known.add(os.getpid())
        os.write(1, b"%d\\n" % os.getpid())

known = set()
explore(main, seeds=1_000_000, processes=2, progress=None)
"""


def test_the_processes_end_when_the_program_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        workers = [os.pidfd_open(int(program.stdout.readline())) for _ in range(2)]
        program.kill()
    ended = select.poll()
    for worker in workers:
        ended.register(worker, select.POLLIN)
    try:
        for _ in workers:
            found = ended.poll(60_000)
            assert found, "a process waits for its parent, which has ended"
            ended.unregister(found[0][0])
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)
