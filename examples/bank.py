"""A bank whose clerks would lose money without locks.

Many processes move money between the accounts of one SQLite file. Each reads two balances, pauses for a while, and
writes them back in separate statements: only the locks prevent lost updates. At the end the sum of all balances must
be unchanged.

    pip install 'genie-lock[sql]'
    genie serve &
    python examples/bank.py                   # the sum is kept
    python examples/bank.py --without-locks   # the same clerks, the same work, and a sum that is wrong

Three kinds of clerks show three ways to use Genie. Some request both accounts at once, which cannot deadlock. Some
request the second account while they hold the first, in `run_transaction`: if two of them wait for each other, the work
of one, which has written nothing yet, is repeated. And some pause now and then between their two writes, for longer than
their transaction timeout: they lose their lock with half a transfer done. Fencing tokens make that safe (see `apply`),
and `compensate` undoes the half.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from ctypes import Array, c_longlong
from functools import partial
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from threading import BrokenBarrierError
from typing import TypeAlias

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, Table, create_engine, func, insert, select

import genie
from genie.sql import FencedTable

OPENING_BALANCE = 1_000_000  # cents
LARGEST_TRANSFER = 10_000
TRANSACTION_TIMEOUT = 0.25  # seconds; a transfer takes a few milliseconds
QUEUE_TIMEOUT = 60.0  # seconds
OPTIONS = {"queue_timeout": QUEUE_TIMEOUT, "transaction_timeout": TRANSACTION_TIMEOUT}
STRATEGIES = ("at once", "step by step", "slow", "step by step")
TRANSFERS_PER_PAUSE = 20  # a slow clerk exceeds its transaction timeout in every 20th transfer
COUNTERS = ("transfers", "retries", "deadlocks", "lost locks")

Change: TypeAlias = tuple[int, int]  # an account, and the amount that is added to its balance
Fences: TypeAlias = dict[int, int]  # for each account, the fencing token of the lock under which it is changed
Counts: TypeAlias = "Array[c_longlong]"  # shared memory: the values of COUNTERS for each clerk

TABLE = Table(
    "accounts",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("balance", Integer, nullable=False),
    Column("fence", BigInteger),  # the greatest fence with which the account was read or written
)
ACCOUNTS = FencedTable(TABLE)


def open_store(path: Path) -> Connection:
    """Open the SQLite file in autocommit mode: each statement is a transaction, and waits for other writers."""
    store = create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT", connect_args={"timeout": 60}).connect()
    store.exec_driver_sql("PRAGMA journal_mode = WAL")
    store.exec_driver_sql("PRAGMA synchronous = OFF")
    return store


def resource(account: int) -> str:
    """Return the resource that locks an account."""
    return f"exclusive:accounts/{account}"


def total(store: Connection) -> int:
    """Return the sum of all balances."""
    return int(store.execute(select(func.sum(TABLE.c.balance))).scalar_one())


class Clerk:
    """Moves money between accounts chosen at random, with one connection to Genie (None: without locks)."""

    def __init__(
        self, number: int, path: Path, options: argparse.Namespace, client: genie.sync.Client | None, counts: Counts
    ) -> None:
        self.number, self.options, self.client, self.counts = number, options, client, counts
        self.strategy = STRATEGIES[number % len(STRATEGIES)]
        self.store = open_store(path)
        self.random = random.Random(f"{options.seed} {number}")
        self.completed = 0

    def work(self, stop: Event) -> None:
        """Make random transfers until `stop` is set. A started transfer is retried until it succeeds, even after `stop`."""
        while not stop.is_set() and self.completed != self.options.transfers:
            source, target = self.random.sample(range(self.options.accounts), 2)
            amount = self.random.randint(1, LARGEST_TRANSFER)
            too_slow = self.strategy == "slow" and self.completed % TRANSFERS_PER_PAUSE == 0
            while not self.transfer([(source, -amount), (target, amount)], too_slow=too_slow):
                self.count("retries")
                too_slow = False
            self.completed += 1
            self.count("transfers")

    def transfer(self, changes: list[Change], *, too_slow: bool) -> bool:
        """Attempt a transfer; return False if it failed, after all its changes were undone.

        `written` may be in memory, because here only locks are lost. If the process itself may crash, each change must
        be recorded in the store, in the statement that makes it.
        """
        written: list[Change] = []
        try:
            self.locked(changes, lambda fences: self.apply(changes, fences, written, too_slow=too_slow))
        except genie.LockLost:  # from Genie at the end of the block, or from an account: StaleFence
            self.count("lost locks")
            self.compensate(written)
        except (genie.QueueTimeout, genie.Deadlock):
            pass  # nothing was written before all locks were granted, so there is nothing to undo
        else:
            return True
        return False

    def apply(self, changes: list[Change], fences: Fences, written: list[Change], *, too_slow: bool = False) -> None:
        """Read all balances, pause, write them one by one; append to `written` each change that the store accepted.

        Fencing tokens grow with every grant, and an account stores the greatest one that it has seen, even for a read.
        From this read on it rejects an earlier clerk that paused for too long (StaleFence). If it stored the tokens of
        writes only, that clerk could still write between this read and this write, and its update would be lost.
        Checking the lock before the write is not enough: a process may be paused right after the check.
        """
        balances = {id: ACCOUNTS.read(self.store, id, fence=fences[id]).balance for id, _ in changes}
        time.sleep(self.random.uniform(0, self.options.pause))
        for account, amount in changes:
            ACCOUNTS.write(self.store, account, {"balance": balances[account] + amount}, fence=fences[account])
            written.append((account, amount))
            if too_slow and len(written) == 1:
                time.sleep(1.5 * TRANSACTION_TIMEOUT)

    def compensate(self, written: list[Change]) -> None:
        """Undo the written part of a transfer that lost its locks: lock the accounts again and subtract the amounts.

        Writing the old balances would be wrong, since other clerks have changed these accounts since. Amounts can be
        added and subtracted in any order. The locks are needed, because this is a change like any other. If they are
        lost again, the accepted part remains undone (a write in between would have caused StaleFence), and the rest is
        repeated under the next locks.
        """
        remaining = [(account, -amount) for account, amount in reversed(written)]
        while remaining:
            undone: list[Change] = []
            with suppress(genie.LockLost, genie.QueueTimeout, genie.Deadlock):
                self.locked(remaining, partial(self.apply, remaining, written=undone))
            remaining = remaining[len(undone) :]

    def locked(self, changes: list[Change], work: Callable[[Fences], None]) -> None:
        """Call `work` with the fencing token of each account, while locks on the accounts are held.

        They are requested at once or step by step.
        """
        accounts = [account for account, _ in changes]
        if self.client is None:
            work(dict.fromkeys(accounts, 1))  # equal fencing tokens reject no write
        elif self.strategy == "step by step":
            self.client.run_transaction(lambda tx: self.step_by_step(tx, accounts, work), **OPTIONS)
        else:
            with self.client.lock(*map(resource, accounts), **OPTIONS) as lock:
                work(dict.fromkeys(accounts, lock.fence))

    def step_by_step(self, tx: genie.sync.Transaction, accounts: list[int], work: Callable[[Fences], None]) -> None:
        """Lock one account after the other, then call `work`. After a deadlock the client calls this method again."""
        try:
            fences = {account: tx.lock(resource(account)).fence for account in accounts}
        except genie.Deadlock:
            self.count("deadlocks")
            raise
        work(fences)

    def count(self, counter: str) -> None:
        """Increment a counter. Each clerk has its own counters, so they need no lock."""
        self.counts[self.number * len(COUNTERS) + COUNTERS.index(counter)] += 1


def clerk(number: int, path: Path, options: argparse.Namespace, counts: Counts, barrier: Barrier, stop: Event) -> None:
    """Run the process of one clerk. All clerks start to work at the same time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `show_progress` handles Ctrl-C, so that every transfer is completed
    try:
        with nullcontext() if options.without_locks else genie.sync.connect() as client:
            barrier.wait()
            Clerk(number, path, options, client, counts).work(stop)
    except genie.GenieError as error:
        barrier.abort()
        sys.exit(f"bank: clerk {number} failed: {error}")
    except BrokenBarrierError:
        sys.exit(1)  # another clerk could not start, and has printed why


def show_progress(clerks: list[SpawnProcess], counts: Counts, seconds: float, stop: Event) -> None:
    """Print the counters every half second until all clerks have ended; set `stop` after `seconds` or on Ctrl-C."""
    end, last_line, terminal = time.monotonic() + seconds, "", sys.stdout.isatty()
    alive = clerks
    while alive:
        try:
            alive[0].join(0.5)
        except KeyboardInterrupt:
            stop.set()
        if time.monotonic() >= end:
            stop.set()
        alive = [process for process in clerks if process.is_alive()]  # before the sums, so that the last one is final
        line = "  ".join(f"{name} {sum(counts[index :: len(COUNTERS)]):,}" for index, name in enumerate(COUNTERS))
        if line != last_line:
            print(f"\r{line}" if terminal else line, end="" if terminal else "\n", flush=True)
        last_line = line
    if terminal:
        print()


def bank(path: Path, options: argparse.Namespace) -> int:
    """Create the accounts, run the clerks, and compare the sums before and after; return the exit status."""
    store = open_store(path)
    TABLE.create(store)
    store.execute(insert(TABLE), [{"id": id, "balance": OPENING_BALANCE} for id in range(options.accounts)])
    before = total(store)
    spawn = multiprocessing.get_context("spawn")
    counts = spawn.RawArray("q", options.workers * len(COUNTERS))
    barrier, stop = spawn.Barrier(options.workers + 1), spawn.Event()
    clerks = []
    for number in range(options.workers):
        clerks.append(spawn.Process(target=clerk, args=(number, path, options, counts, barrier, stop), daemon=True))
        clerks[-1].start()
    with suppress(BrokenBarrierError):  # a clerk that can't start prints why
        barrier.wait(QUEUE_TIMEOUT)
    show_progress(clerks, counts, math.inf if options.transfers is not None else options.seconds, stop)
    after = total(store)
    print(f"sum before {before / 100:,.2f}, after {after / 100:,.2f}, difference {(after - before) / 100:,.2f}")
    failed = any(process.exitcode for process in clerks)
    return 1 if failed or (after != before and not options.without_locks) else 0


def main() -> int:
    """Run the example against the server at GENIE_HOST and GENIE_PORT."""
    parser = argparse.ArgumentParser(description="Move money between accounts, with or without locks.")
    parser.add_argument("--workers", type=int, default=8, help="number of processes that move money (8)")
    parser.add_argument("--accounts", type=int, default=10, help="number of accounts, at least 2 (10)")
    parser.add_argument("--seconds", type=float, default=5, help="duration of the run (5)")
    parser.add_argument("--transfers", type=int, help="number of transfers of each worker, regardless of --seconds")
    parser.add_argument(
        "--pause", type=float, default=0.002, help="maximum seconds between reading and writing (0.002)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random accounts and amounts (1)")
    parser.add_argument("--without-locks", action="store_true", help="show what happens without Genie")
    options = parser.parse_args()
    if options.workers < 1 or options.accounts < 2 or options.pause < 0:  # noqa: PLR2004 - a transfer takes two
        parser.error("--workers must be at least 1, --accounts at least 2, and --pause at least 0")
    if not options.without_locks:
        try:
            with genie.sync.connect(connect_timeout=1) as client:
                client.ping()
        except (genie.GenieError, ValueError) as error:
            sys.exit(f"bank: {error} (start a server with: genie serve)")
    with tempfile.TemporaryDirectory() as folder:
        return bank(Path(folder) / "bank.db", options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the clerks have started
        sys.exit(130)
