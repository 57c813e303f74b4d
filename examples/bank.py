"""A bank whose clerks would lose money without locks.

Many processes move money between the accounts of one SQLite file. Each reads two balances, pauses for a while, and
writes them back in separate statements: only the locks prevent lost updates. At the end the sum of all balances must
be unchanged.

    pip install 'genie-lock[sql]'
    genie serve &
    python examples/bank.py                   # the sum is kept
    python examples/bank.py --without-locks   # the same clerks, the same work, and a sum that is wrong

Three kinds of clerks show three ways to use Genie. Some request both accounts at once, which cannot deadlock. Some
request the second account while they hold the first, with a transaction name: if two of them wait for each other, one
gets `Deadlock`, has written nothing yet, and starts over. And some pause now and then between their two writes, for
longer than their transaction timeout: they lose their lock with half a transfer done. Fencing tokens make that safe
(see `change`), and `take_back` undoes the half.
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
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from ctypes import Array, c_longlong
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
HOLD = 0.25  # seconds until a lock times out; a transfer takes a few milliseconds
QUEUE_TIMEOUT = 60.0  # seconds
KINDS = ("at once", "step by step", "sleepy", "step by step")
NAP_EVERY = 20  # a sleepy clerk pauses in every 20th transfer
COUNTED = ("transfers", "retries", "deadlocks", "lost locks")

Change: TypeAlias = tuple[int, int]  # an account, and what is added to its balance
Fences: TypeAlias = dict[int, int]  # for each account, the fence of the lock under which it is changed
Counts: TypeAlias = "Array[c_longlong]"  # shared memory: the numbers of COUNTED for each clerk

TABLE = Table(
    "accounts",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("balance", Integer, nullable=False),
    Column("fence", BigInteger),  # the greatest fence with which the account was read or written
)
ACCOUNTS = FencedTable(TABLE)


def open_store(path: Path) -> Connection:
    """Each statement is a transaction of its own, and waits while another process writes to the file."""
    store = create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT", connect_args={"timeout": 60}).connect()
    store.exec_driver_sql("PRAGMA journal_mode = WAL")
    store.exec_driver_sql("PRAGMA synchronous = OFF")
    return store


def total(store: Connection) -> int:
    """The sum of all balances."""
    return int(store.execute(select(func.sum(TABLE.c.balance))).scalar_one())


class Clerk:
    """Moves money between accounts chosen at random, with one connection to Genie (None: without locks)."""

    def __init__(
        self, number: int, path: Path, options: argparse.Namespace, client: genie.sync.Client | None, counts: Counts
    ) -> None:
        self.number, self.options, self.client, self.counts = number, options, client, counts
        self.kind = KINDS[number % len(KINDS)]
        self.store = open_store(path)
        self.random = random.Random(f"{options.seed} {number}")
        self.done = 0

    def work(self, stop: Event) -> None:
        """Transfer after transfer. One that was begun is repeated until it is made, also after `stop`."""
        while not stop.is_set() and self.done != self.options.transfers:
            source, target = self.random.sample(range(self.options.accounts), 2)
            amount = self.random.randint(1, LARGEST_TRANSFER)
            nap = self.kind == "sleepy" and self.done % NAP_EVERY == 0
            while not self.transfer([(source, -amount), (target, amount)], nap=nap):
                self.count("retries")
                nap = False
            self.done += 1
            self.count("transfers")

    def transfer(self, changes: list[Change], *, nap: bool) -> bool:
        """One attempt; False if it failed, and then all that it had changed is changed back.

        `written` is in memory, since only the lock dies on the way here. A clerk who may die too has to write each
        change down in the store, in the statement that makes it.
        """
        written: list[Change] = []
        try:
            with self.locked([account for account, _ in changes]) as fences:
                self.change(changes, fences, written, nap=nap)
        except genie.LockLost:  # said by Genie when the block ends, or by an account: StaleFence
            self.count("lost locks")
            self.take_back(written)
        except genie.Deadlock:
            self.count("deadlocks")  # nothing is written before all is locked, so there is nothing to take back
        except genie.QueueTimeout:
            pass  # nor here
        else:
            return True
        return False

    def change(self, changes: list[Change], fences: Fences, written: list[Change], *, nap: bool = False) -> None:
        """Read all balances, think, write them one by one; `written` gets what the store has accepted.

        Fencing tokens grow with every grant, and an account remembers the greatest one that it has seen, also for a read.
        From this read on it rejects an earlier clerk who paused for too long (StaleFence). If it remembered tokens of
        writes only, that clerk could still write between this read and this write, and its update would be lost.
        Checking the lock before the write is not enough: a process may be paused right after the check.
        """
        balances = {id: ACCOUNTS.read(self.store, id, fence=fences[id]).balance for id, _ in changes}
        time.sleep(self.random.uniform(0, self.options.pause))
        for account, amount in changes:
            ACCOUNTS.write(self.store, account, {"balance": balances[account] + amount}, fence=fences[account])
            written.append((account, amount))
            if nap and len(written) == 1:
                time.sleep(1.5 * HOLD)

    def take_back(self, written: list[Change]) -> None:
        """Undo what was done of a transfer that lost its lock: ask for the locks again, then subtract the amounts.

        Not by writing the old balances: others have had these accounts since and have changed them, rightly. Amounts
        can be added and subtracted in any order. And not without locks: this is a change like any other. If they are
        lost again, the accepted part is undone for good (a write in between would have caused StaleFence), and the rest is
        repeated under the next locks.
        """
        left = [(account, -amount) for account, amount in reversed(written)]
        while left:
            undone: list[Change] = []
            lost_again = suppress(genie.LockLost, genie.QueueTimeout, genie.Deadlock)
            with lost_again, self.locked([account for account, _ in left]) as fences:
                self.change(left, fences, undone)
            left = left[len(undone) :]

    @contextmanager
    def locked(self, accounts: list[int]) -> Iterator[Fences]:
        """Hold the accounts, all at once or step by step; gives the fence under which each is held."""
        if self.client is None:
            yield dict.fromkeys(accounts, 1)  # equal fencing tokens reject no write
        elif self.kind == "step by step":
            # The name is this transaction's own: what it holds is not in its way, and cycles are found between names.
            name = f"transfer-{self.number}-{self.done}"
            with ExitStack() as held:
                yield {account: held.enter_context(self.lock(account, transaction=name)).fence for account in accounts}
        else:
            with self.lock(*accounts) as lock:
                yield dict.fromkeys(accounts, lock.fence)

    def lock(self, *accounts: int, transaction: str | None = None) -> AbstractContextManager[genie.sync.Lock]:
        """One request to Genie."""
        assert self.client is not None  # noqa: S101
        names = [f"exclusive:accounts/{account}" for account in accounts]
        return self.client.lock(*names, transaction=transaction, queue_timeout=QUEUE_TIMEOUT, transaction_timeout=HOLD)

    def count(self, what: str) -> None:
        """Each clerk has counters of its own, so none is counted in two places at once."""
        self.counts[self.number * len(COUNTED) + COUNTED.index(what)] += 1


def clerk(number: int, path: Path, options: argparse.Namespace, counts: Counts, barrier: Barrier, stop: Event) -> None:
    """A clerk's process. All begin together, when the last one is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for `follow`, so that no transfer is left half done
    try:
        with nullcontext() if options.without_locks else genie.sync.connect() as client:
            barrier.wait()
            Clerk(number, path, options, client, counts).work(stop)
    except genie.GenieError as error:
        barrier.abort()
        sys.exit(f"bank: clerk {number} gave up: {error}")
    except BrokenBarrierError:
        sys.exit(1)  # another clerk could not begin, and has said why


def follow(clerks: list[SpawnProcess], counts: Counts, seconds: float, stop: Event) -> None:
    """Show what is done each half second until all clerks have ended; tell them to stop when the time is over."""
    end, shown, terminal = time.monotonic() + seconds, "", sys.stdout.isatty()
    alive = clerks
    while alive:
        try:
            alive[0].join(0.5)
        except KeyboardInterrupt:
            stop.set()
        if time.monotonic() >= end:
            stop.set()
        alive = [process for process in clerks if process.is_alive()]  # first, so that the last line counts everything
        line = "  ".join(f"{name} {sum(counts[kind :: len(COUNTED)]):,}" for kind, name in enumerate(COUNTED))
        if line != shown:
            print(f"\r{line}" if terminal else line, end="" if terminal else "\n", flush=True)
        shown = line
    if terminal:
        print()


def bank(path: Path, options: argparse.Namespace) -> int:
    """Open the accounts, let the clerks work, count the money; returns the exit status."""
    store = open_store(path)
    TABLE.create(store)
    store.execute(insert(TABLE), [{"id": id, "balance": OPENING_BALANCE} for id in range(options.accounts)])
    before = total(store)
    spawn = multiprocessing.get_context("spawn")
    counts = spawn.RawArray("q", options.workers * len(COUNTED))
    barrier, stop = spawn.Barrier(options.workers + 1), spawn.Event()
    clerks = []
    for number in range(options.workers):
        clerks.append(spawn.Process(target=clerk, args=(number, path, options, counts, barrier, stop), daemon=True))
        clerks[-1].start()
    with suppress(BrokenBarrierError):  # a clerk who can't begin says why
        barrier.wait(QUEUE_TIMEOUT)
    follow(clerks, counts, math.inf if options.transfers is not None else options.seconds, stop)
    after = total(store)
    print(f"sum before {before / 100:,.2f}, after {after / 100:,.2f}, difference {(after - before) / 100:,.2f}")
    failed = any(process.exitcode for process in clerks)
    return 1 if failed or (after != before and not options.without_locks) else 0


def main() -> int:
    """Read the command line; the server is the one at GENIE_HOST and GENIE_PORT."""
    parser = argparse.ArgumentParser(description="Move money under locks, or without.")
    parser.add_argument("--workers", type=int, default=8, help="processes that move money (8)")
    parser.add_argument("--accounts", type=int, default=10, help="accounts, at least 2 (10)")
    parser.add_argument("--seconds", type=float, default=5, help="how long (5)")
    parser.add_argument("--transfers", type=int, help="number of transfers of each worker, regardless of --seconds")
    parser.add_argument(
        "--pause", type=float, default=0.002, help="seconds at most between reading and writing (0.002)"
    )
    parser.add_argument("--seed", type=int, default=1, help="another one chooses other accounts and amounts (1)")
    parser.add_argument("--without-locks", action="store_true", help="show what happens without Genie")
    options = parser.parse_args()
    if options.workers < 1 or options.accounts < 2 or options.pause < 0:  # noqa: PLR2004 - a transfer takes two
        parser.error("there must be a worker, two accounts and a pause that is not negative")
    if not options.without_locks:
        try:
            with genie.sync.connect() as client:
                client.ping()
        except (genie.GenieError, ValueError) as error:
            sys.exit(f"bank: {error} (a server is started by: genie serve)")
    with tempfile.TemporaryDirectory() as folder:
        return bank(Path(folder) / "bank.db", options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the clerks began
        sys.exit(130)
