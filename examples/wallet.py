"""Replicas that pay out of shared wallets, while one of them is killed.

Each replica is a process with a selector of its own. Any of them pays for any wallet, several payments at a time: it
selects tokens that together reach the amount, holds them in Genie while the payment is "made", and spends them. The
store is one SQLite file. Halfway one replica gets SIGKILL, with tokens held; a new one takes its place. At the end the
wallets together must have what they had.

    pip install 'genie-lock[sql]'
    genie serve &
    python examples/wallet.py

The tokens of the killed replica stay locked until their lease expires. Until then the other replicas select other
tokens, or get `FundsLocked`.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of Ctrl-C during the imports; main() sets it back

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
from genie.tokens import (
    FundsLocked,
    InsufficientFunds,
    SelectionEnded,
    SherdlockSelector,
    SpentAlready,
    SqlTokenStore,
    Token,
)

KIND = {"token_type": "Fiat", "identifier": "CHF"}
TOKEN = 1_000  # what each token is worth at the beginning, in cents
LARGEST_PAYMENT = 4_000
COUNTED = ("payments", "not enough", "held by others", "too late")

Counts: TypeAlias = "Array[c_longlong]"  # shared memory: the numbers of COUNTED for each replica


class Replica:
    """Executes payments. It has no connection to the other replicas."""

    def __init__(self, number: int, options: argparse.Namespace, selector: SherdlockSelector, counts: Counts) -> None:
        self.number, self.options, self.selector, self.counts = number, options, selector, counts
        self.random = random.Random(f"{options.seed} {number}")
        self.done = 0

    async def pay_until(self, stop: c_byte) -> None:
        """Payment after payment, several of them at a time."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.options.at_a_time):
                tasks.create_task(self.pay_one_after_the_other(stop))

    async def pay_one_after_the_other(self, stop: c_byte) -> None:
        """Make random payments until `stop` is set."""
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
        """Move an amount. What is selected is released on every way out on which it was not spent."""
        self.done += 1
        name = f"payment-{self.number}-{self.done}"
        async with await self.selector.select(amount, owner=payer, transaction=name, **KIND) as selection:
            await asyncio.sleep(self.random.uniform(0, self.options.pause))  # the payment is made
            outputs = [Token(f"{name}-paid", payee, amount=amount, **KIND)]
            if selection.change:
                outputs.append(Token(f"{name}-change", payer, amount=selection.change, **KIND))
            await selection.spend(outputs)

    def count(self, what: str) -> None:
        """Each replica has counters of its own, so none is counted in two places at once."""
        self.counts[self.number * len(COUNTED) + COUNTED.index(what)] += 1


def replica(number: int, url: str, options: argparse.Namespace, counts: Counts, ready: Semaphore, stop: c_byte) -> None:
    """A replica's process. It says when it is ready. SIGINT is blocked in it: the parent tells all to stop."""

    async def run() -> None:
        async with (
            genie.connect() as client,
            SqlTokenStore(url) as store,
            SherdlockSelector(client, store, lease=options.lease, backoff=0.5) as selector,
        ):
            ready.release()
            await Replica(number, options, selector, counts).pay_until(stop)

    try:
        asyncio.run(run())
    except* genie.GenieError as errors:
        sys.exit(f"wallet: replica {number} gave up: {errors.exceptions[0]}")


async def totals(store: SqlTokenStore) -> dict[str, int]:
    """What each wallet has, as the store says."""
    found: dict[str, int] = {}
    async for page in store.unspent(**KIND):
        for token in page:
            found[token.owner] = found.get(token.owner, 0) + token.amount
    return dict(sorted(found.items()))


def line(found: dict[str, int], counts: Counts) -> str:
    """What the wallets have, and what was done."""
    wallets = "  ".join(f"{name} {amount / 100:,.2f}" for name, amount in found.items())
    done = ", ".join(f"{name} {sum(counts[kind :: len(COUNTED)]):,}" for kind, name in enumerate(COUNTED))
    return f"{wallets}  |  {sum(found.values()) / 100:,.2f} in all  |  {done}"


async def watch_over(url: str, options: argparse.Namespace) -> int:
    """Issue tokens, let the replicas pay, kill one, count the money; returns the exit status."""
    spawn = multiprocessing.get_context("spawn")
    counts, ready = spawn.RawArray("q", (options.replicas + 1) * len(COUNTED)), spawn.Semaphore(0)
    stop = spawn.RawValue("b", 0)  # an Event has a lock, which a replica that is killed may hold
    replicas: list[SpawnProcess] = []

    def begin(number: int) -> None:
        replicas.append(spawn.Process(target=replica, args=(number, url, options, counts, ready, stop), daemon=True))
        # Ctrl-C is for this process only. A replica inherits that, also while it still imports.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            replicas[-1].start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    async with SqlTokenStore(url) as store:
        names = [f"wallet-{number}" for number in range(options.wallets)]
        await store.add(
            [Token(f"{name}-{i}", name, amount=TOKEN, **KIND) for name in names for i in range(options.tokens)]
        )
        before = sum((await totals(store)).values())
        for number in range(options.replicas):
            begin(number)
        for _ in range(options.replicas):
            while not await asyncio.to_thread(ready.acquire, timeout=0.1):
                if any(process.exitcode for process in replicas):  # one that can't begin says why
                    stop.value = 1
                    return 1
        end, victim = time.monotonic() + options.seconds, replicas[0]
        half = end - options.seconds / 2
        while time.monotonic() < end:
            await asyncio.sleep(min(0.5, options.seconds / 8))
            print(line(await totals(store), counts), flush=True)
            if time.monotonic() >= half and victim.exitcode is None:
                victim.kill()
                await asyncio.to_thread(victim.join)
                print("replica 0 was killed, with what it held; another takes its place", flush=True)
                begin(options.replicas)
        stop.value = 1
        for process in replicas:
            await asyncio.to_thread(process.join)
        found = await totals(store)
    after = sum(found.values())
    print(line(found, counts))
    print(f"in all before {before / 100:,.2f}, after {after / 100:,.2f}, difference {(after - before) / 100:,.2f}")
    return 1 if any(process.exitcode for process in replicas[1:]) or after != before else 0


async def reach() -> None:
    """GenieError, if there is no server."""
    async with genie.connect() as client:
        await client.ping()


def main() -> int:
    """Read the command line; the server is the one at GENIE_HOST and GENIE_PORT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description="Pay out of shared wallets, from many processes, one of which dies.")
    parser.add_argument("--replicas", type=int, default=4, help="processes that pay (4)")
    parser.add_argument("--wallets", type=int, default=3, help="wallets, at least 2 (3)")
    parser.add_argument("--tokens", type=int, default=20, help="tokens in each at the beginning (20)")
    parser.add_argument("--seconds", type=float, default=10, help="how long (10)")
    parser.add_argument("--lease", type=float, default=4, help="seconds that tokens stay locked, at most (4)")
    parser.add_argument("--at-a-time", type=int, default=4, help="payments that a replica makes at a time (4)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds at most that a payment takes (0.05)")
    parser.add_argument("--seed", type=int, default=1, help="another one chooses other wallets and amounts (1)")
    options = parser.parse_args()
    if min(options.replicas, options.wallets - 1, options.tokens, options.at_a_time) < 1:
        parser.error("there must be a replica, two wallets, a token in each and a payment at a time")
    if not (options.seconds >= 1 and options.lease >= 1 and options.pause >= 0):
        parser.error("it takes a second or more, and so does a lease; a pause is not negative")
    try:
        asyncio.run(reach())
    except (genie.GenieError, ValueError) as error:
        sys.exit(f"wallet: {error} (a server is started by: genie serve)")
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(watch_over(f"sqlite+aiosqlite:///{Path(folder) / 'tokens.db'}", options))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
