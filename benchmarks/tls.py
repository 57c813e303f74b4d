"""The cost of TLS: the same load alternately on a server with TLS and on one without.

    python benchmarks/tls.py [--rounds N] [--seconds S]

Both servers keep locks in memory and run all the time; the load is `genie bench own`. Figures are medians of the rounds,
and ratios are medians of the ratios of each round, which makes them robust against noise. If there are two processors, the
servers run on one and the load on the other. CPU is that of the server's process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import orjson
import trustme

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.processes import accepts, cpu_s, free_port, pinned, serving  # noqa: E402

LOADS = (
    ("one connection", 1, 1),
    ("64 connections", 64, 1),
    ("64 connections, 64 in flight on each", 64, 64),
)


def _server(stack: ExitStack, folder: Path, name: str, **variables: str) -> tuple[int, int]:
    """Start a server for the block; yield its port and its process."""
    port = free_port()
    variables |= {"GENIE_PORT": str(port), "GENIE_ADMIN_PORT": "", "GENIE_LOG_LEVEL": "warning"}
    command = [*pinned()[0], sys.executable, "-m", "genie.cli", "serve"]
    log = folder / f"{name}.log"
    return port, stack.enter_context(serving(command, log, lambda: accepts(port), environment=_own() | variables))


def _own() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    return kept | {"PYTHONPATH": str(ROOT)}


def _measure(host: str, pid: int, ca: Path, connections: int, depth: int, seconds: float) -> tuple[float, float]:
    """Return cycles a second, and microseconds of the server's CPU for each cycle."""
    processor = pinned()[2]
    prefix = [] if processor is None else ["taskset", "-c", str(processor)]
    load = ["bench", "own", "--connections", str(connections), "--depth", str(depth), "--seconds", str(seconds)]
    before = cpu_s([pid])[pid]
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "genie.cli", *load, "--warm-up", "0.2", "--host", host, "--json"],
        env=_own() | {"GENIE_TLS_CA": str(ca)},
        stdout=subprocess.PIPE,
        check=True,
    )
    used = cpu_s([pid])[pid] - before
    result = orjson.loads(done.stdout)["workloads"][0]
    rate = float(result["cycles_per_s"])
    return rate, used / (rate * (seconds + 0.2)) * 1e6


def main() -> None:
    """Measure with and without TLS, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        authority, ca, certificate = trustme.CA(), folder / "ca.pem", folder / "server.pem"
        authority.cert_pem.write_to_path(str(ca))
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
        plain = _server(stack, folder, "plain")
        tls = _server(stack, folder, "tls", GENIE_TLS_CERT=str(certificate))
        print(
            "| load | plain, cycles/s | TLS, cycles/s | TLS / plain | server CPU a cycle, plain | TLS | TLS / plain |"
        )
        print("| --- | --: | --: | --: | --: | --: | --: |")
        for name, connections, depth in LOADS:
            rounds = []
            for number in range(options.rounds):
                pairs = [(f"genie://127.0.0.1:{plain[0]}", plain[1]), (f"genies://127.0.0.1:{tls[0]}", tls[1])]
                found = {}
                for host, pid in pairs if number % 2 else reversed(pairs):
                    found[host] = _measure(host, pid, ca, connections, depth, options.seconds)
                rounds.append([found[host] for host, _ in pairs])
            print(_row(name, rounds), flush=True)


def _row(name: str, rounds: list[list[tuple[float, float]]]) -> str:
    rates = [statistics.median(each[side][0] for each in rounds) for side in (0, 1)]
    costs = [statistics.median(each[side][1] for each in rounds) for side in (0, 1)]
    rate_ratio = statistics.median(secure[0] / plain[0] for plain, secure in rounds)
    cost_ratio = statistics.median(secure[1] / plain[1] for plain, secure in rounds)
    return (
        f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {rate_ratio:.2f} "
        f"| {costs[0]:.0f} µs | {costs[1]:.0f} µs | {cost_ratio:.2f} |"
    )


if __name__ == "__main__":
    main()
