"""Replicas that pay out of shared wallets, while one of them is killed.

Each replica is a process with a selector of its own. Any of them pays for any wallet, several payments at a time: it
selects tokens that together reach the amount, holds them in Genie while the payment is "made", and spends them. The
store is one SQLite file. Halfway one replica gets SIGKILL, with tokens held; a new one takes its place. At the end the
wallets together must have what they had.

    pip install 'genie-tokens[sqlite]' 'genie-lock[server]'
    genie serve &
    python applications/tokens/examples/wallet.py

The tokens of the killed replica stay locked until their lease expires. Until then the other replicas select other
tokens, or get `FundsLocked`.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C during the imports; main() restores it

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
import time
from ctypes import Array, c_byte, c_longlong
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import TypeAlias

import genie
from genie_tokens import (
    FundsLocked,
    InsufficientFunds,
    SelectionEnded,
    SherdlockSelector,
    SpentAlready,
    SqlTokenStore,
    Token,
)

KIND = {"token_type": "Fiat", "identifier": "CHF"}
INITIAL_TOKEN_AMOUNT = 1_000  # cents
LARGEST_PAYMENT = 4_000
COUNTERS = ("payments", "not enough", "held by others", "too late")

Counts: TypeAlias = "Array[c_longlong]"  # shared memory: the values of COUNTERS for each replica


class Replica:
    """Executes payments. It has no connection to the other replicas."""

    def __init__(self, number: int, options: argparse.Namespace, selector: SherdlockSelector, counts: Counts) -> None:
        self.number, self.options, self.selector, self.counts = number, options, selector, counts
        self.random = random.Random(f"{options.seed} {number}")
        self.payment_count = 0

    async def run(self, stop: c_byte) -> None:
        """Make payments concurrently until `stop` is set."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.options.at_a_time):
                tasks.create_task(self.make_payments(stop))

    async def make_payments(self, stop: c_byte) -> None:
        """Make random payments one after the other until `stop` is set."""
        while not stop.value:
            payer, payee = self.random.sample(range(self.options.wallets), 2)
            try:
                await self.pay(f"wallet-{payer}", f"wallet-{payee}", self.random.randint(1, LARGEST_PAYMENT))
                self.count("payments")
            except FundsLocked:
                self.count("held by others")
            except InsufficientFunds:
                self.count("not enough")
                await asyncio.sleep(0.05)
            except (SpentAlready, SelectionEnded):  # would be a defect, unless the lease was shorter than the payment
                self.count("too late")

    async def pay(self, payer: str, payee: str, amount: int) -> None:
        """Select tokens of the payer that reach the amount, and spend them. If this fails, they are released."""
        self.payment_count += 1
        name = f"payment-{self.number}-{self.payment_count}"
        async with await self.selector.select(amount, owner=payer, transaction=name, **KIND) as selection:
            await asyncio.sleep(self.random.uniform(0, self.options.pause))  # simulates work
            outputs = [Token(f"{name}-paid", payee, amount=amount, **KIND)]
            if selection.change:
                outputs.append(Token(f"{name}-change", payer, amount=selection.change, **KIND))
            await selection.spend(outputs)

    def count(self, counter: str) -> None:
        """Increment a counter. Each replica has its own counters, so they need no lock."""
        self.counts[self.number * len(COUNTERS) + COUNTERS.index(counter)] += 1


def replica(number: int, url: str, options: argparse.Namespace, counts: Counts, ready: Semaphore, stop: c_byte) -> None:
    """Run the process of one replica. It ignores Ctrl-C: SIGINT is blocked, and the parent sets `stop`."""

    async def run() -> None:
        async with (
            genie.connect() as client,
            SqlTokenStore(url) as store,
            SherdlockSelector(client, store, lease=options.lease, backoff=0.5) as selector,
        ):
            ready.release()
            await Replica(number, options, selector, counts).run(stop)

    try:
        asyncio.run(run())
    except* genie.GenieError as errors:
        sys.exit(f"wallet: replica {number} failed: {errors.exceptions[0]}")


async def balances(store: SqlTokenStore) -> dict[str, int]:
    """Return the sum of the unspent tokens of each wallet."""
    amounts: dict[str, int] = {}
    async for page in store.unspent(**KIND):
        for token in page:
            amounts[token.owner] = amounts.get(token.owner, 0) + token.amount
    return dict(sorted(amounts.items()))


def progress_line(amounts: dict[str, int], counts: Counts) -> str:
    """Format the balances and the counters."""
    wallets = "  ".join(f"{name} {amount / 100:,.2f}" for name, amount in amounts.items())
    counters = ", ".join(f"{name} {sum(counts[index :: len(COUNTERS)]):,}" for index, name in enumerate(COUNTERS))
    return f"{wallets}  |  {sum(amounts.values()) / 100:,.2f} in all  |  {counters}"


async def run_replicas(url: str, options: argparse.Namespace) -> int:
    """Issue tokens, run the replicas, kill and replace one, and compare the sums; return the exit status."""
    spawn = multiprocessing.get_context("spawn")
    counts, ready = spawn.RawArray("q", (options.replicas + 1) * len(COUNTERS)), spawn.Semaphore(0)
    stop = spawn.RawValue("b", 0)  # not an Event, whose lock a killed replica might hold
    replicas: list[SpawnProcess] = []

    def start(number: int) -> None:
        replicas.append(spawn.Process(target=replica, args=(number, url, options, counts, ready, stop), daemon=True))
        # Only this process handles Ctrl-C. A replica inherits the blocked signal before its first import.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            replicas[-1].start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    async with SqlTokenStore(url) as store:
        names = [f"wallet-{number}" for number in range(options.wallets)]
        await store.add(
            [
                Token(f"{name}-{i}", name, amount=INITIAL_TOKEN_AMOUNT, **KIND)
                for name in names
                for i in range(options.tokens)
            ]
        )
        sum_before = sum((await balances(store)).values())
        for number in range(options.replicas):
            start(number)
        for _ in range(options.replicas):
            while not await asyncio.to_thread(ready.acquire, timeout=0.1):
                if any(process.exitcode for process in replicas):  # it has printed why it can't start
                    stop.value = 1
                    return 1
        end, victim = time.monotonic() + options.seconds, replicas[0]
        half_time = end - options.seconds / 2
        while time.monotonic() < end:
            await asyncio.sleep(min(0.5, options.seconds / 8))
            print(progress_line(await balances(store), counts), flush=True)
            if time.monotonic() >= half_time and victim.exitcode is None:
                victim.kill()
                await asyncio.to_thread(victim.join)
                print("replica 0 was killed while it held tokens; another one replaces it", flush=True)
                start(options.replicas)
        stop.value = 1
        for process in replicas:
            await asyncio.to_thread(process.join)
        amounts = await balances(store)
    sum_after = sum(amounts.values())
    print(progress_line(amounts, counts))
    difference = sum_after - sum_before
    print(f"in all before {sum_before / 100:,.2f}, after {sum_after / 100:,.2f}, difference {difference / 100:,.2f}")
    return 1 if any(process.exitcode for process in replicas[1:]) or difference else 0


async def check_server() -> None:
    """Raise GenieError if no server can be reached."""
    async with genie.connect(connect_timeout=1) as client:
        await client.ping()


def main() -> int:
    """Run the example against the server at GENIE_HOST and GENIE_PORT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description="Pay out of shared wallets, from several processes, and kill one.")
    parser.add_argument("--replicas", type=int, default=4, help="number of processes that pay (4)")
    parser.add_argument("--wallets", type=int, default=3, help="number of wallets, at least 2 (3)")
    parser.add_argument("--tokens", type=int, default=20, help="initial number of tokens in each wallet (20)")
    parser.add_argument("--seconds", type=float, default=10, help="duration of the run (10)")
    parser.add_argument("--lease", type=float, default=4, help="maximum seconds that tokens stay locked (4)")
    parser.add_argument("--at-a-time", type=int, default=4, help="concurrent payments of each replica (4)")
    parser.add_argument("--pause", type=float, default=0.05, help="maximum duration of a payment in seconds (0.05)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random wallets and amounts (1)")
    options = parser.parse_args()
    if min(options.replicas, options.wallets - 1, options.tokens, options.at_a_time) < 1:
        parser.error("--replicas, --tokens and --at-a-time must be at least 1, --wallets at least 2")
    if not (options.seconds >= 1 and options.lease >= 1 and options.pause >= 0):
        parser.error("--seconds and --lease must be at least 1, --pause at least 0")
    try:
        asyncio.run(check_server())
    except (genie.GenieError, ValueError) as error:
        sys.exit(f"wallet: {error} (start a server with: genie serve)")
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run_replicas(f"sqlite+aiosqlite:///{Path(folder) / 'tokens.db'}", options))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
