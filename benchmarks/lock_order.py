"""The cost of the lock order analysis: the same load alternately on a server with it and on one without.

    python benchmarks/lock_order.py [--rounds N] [--transactions N]

Both servers keep locks in memory and run all the time. Each of 16 connections sends transactions in blocks of 16: it
locks two or four resources one after the other, and releases them. `named`: the transaction has a name, so its order is
analysed; `one class`: both resources are of one class; `without a name`: the requests are independent. The figure is the CPU time of
the server for each transaction; the ratio is the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.processes import cpu_s, executes, free_port, pinned, serving  # noqa: E402

CONNECTIONS = 16
BLOCK = 16
LOADS = {
    "named, two classes": (True, ("accounts/", "orders/")),
    "named, one class": (True, ("accounts/", "accounts/")),
    "named, four classes": (True, ("accounts/", "orders/", "parcels/", "stock/")),
    "without a name": (False, ("accounts/", "orders/")),
}


def _server(stack: ExitStack, folder: Path, setting: str) -> tuple[int, int]:
    """Start a server for the block. Return its port and its process id."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    environment |= {"GENIE_PORT": str(port), "GENIE_ADMIN_PORT": "", "GENIE_LOG_LEVEL": "error"}
    environment |= {"PYTHONPATH": str(ROOT), "GENIE_LOCK_ORDER": setting}
    command = [*pinned()[0], sys.executable, "-m", "genie.cli", "serve"]
    pid = stack.enter_context(
        serving(command, folder / f"{setting}.log", lambda: executes(port), environment=environment)
    )
    return port, pid


def _block(random: Random, connection: int, number: int, prefixes: tuple[str, ...], *, named: bool) -> bytes:
    """Return the lines of a block of transactions. No two transactions of a block use the same resource."""
    lines = []
    most = 4 * BLOCK
    first = random.randrange(100_000, 900_000) // most * most
    for index in range(BLOCK):
        transaction = f'"transactionName":"t{connection}-{number}-{index}",' if named else ""
        for step, prefix in enumerate(prefixes):
            name = f"{connection}.{prefix}{first + 4 * index + step}"
            lines.append(
                f'{{"command":"request","payload":{{{transaction}"ref":"{number}.{index}.{step}","resources":["exclusive:{name}"]}}}}\n'
            )
        lines += (
            f'{{"command":"release","payload":{{"ref":"{number}.{index}.{step}"}}}}\n' for step in range(len(prefixes))
        )
    return "".join(lines).encode()


async def load(port: int, transactions: int, prefixes: tuple[str, ...], *, named: bool) -> None:
    """Send transactions on all connections, and read all replies. Raises ValueError for an error reply."""

    async def run(connection: int) -> None:
        random = Random(connection)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b'{"command":"hello","payload":{"quiet":true}}\n')
        await reader.readline()
        for number in range(transactions // CONNECTIONS // BLOCK):
            writer.write(_block(random, connection, number, prefixes, named=named))
            replies, expected = 0, 2 * len(prefixes) * BLOCK
            while replies < expected:
                data = await reader.read(1 << 16)
                if not data or b'"error"' in data:
                    raise ValueError(data[:500])
                replies += data.count(b"\n")
        writer.close()

    await asyncio.gather(*map(run, range(CONNECTIONS)))


def main() -> None:
    """Measure each load in rounds, and print a table."""
    parser = argparse.ArgumentParser(description="The cost of the lock order analysis.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transactions", type=int, default=163_840)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {setting: _server(stack, folder, setting) for setting in ("on", "off")}
        print(f"{'load':<22}{'off, µs':>10}{'on, µs':>10}{'on/off':>9}")
        for title, (named, prefixes) in LOADS.items():
            rounds = []
            for number in range(options.rounds + 1):
                used = {}
                for setting in ("on", "off") if number % 2 else ("off", "on"):
                    port, pid = servers[setting]
                    before = cpu_s([pid])[pid]
                    asyncio.run(load(port, options.transactions, prefixes, named=named))
                    used[setting] = (cpu_s([pid])[pid] - before) / options.transactions * 1e6
                rounds.append(used)
            measured = rounds[1:]  # the first round warms up
            off, on = (statistics.median(each[setting] for each in measured) for setting in ("off", "on"))
            ratio = statistics.median(each["on"] / each["off"] for each in measured)
            print(f"{title:<22}{off:>10.1f}{on:>10.1f}{ratio:>9.3f}", flush=True)


if __name__ == "__main__":
    main()
