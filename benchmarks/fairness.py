"""Fairness: how long a `ping` takes while other connections flood the server, and what the flood itself gets.

    python benchmarks/fairness.py [--rounds N] [--seconds S] [--only WORDS] [--redis] [--base GENIE]

A flood sends one kind of command as fast as the server reads it, and reads all replies; from one connection, then from
fifty. Another process pings every 4 ms on a separate connection. The server runs on one processor, the clients on another.

The goal is a 99th percentile below 50 ms. The last rows are the ends of connections and sessions with 150,000 locks, and the
like: there the goal is that the longest ping takes less than 50 ms. With `--base`, the `genie` program of another build, that build is measured in the
same rounds, and first in every other round. The last column is then the median of the ratios of the flood's rates, whose
goal is 0.9. The first row is measured without a flood: it is the noise of the machine.

The exit status is 1 if a goal is missed. A busy machine misses goals sooner: compare with the base there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fairness_parts.ends import ENDS, End  # noqa: E402
from fairness_parts.floods import FLOODS, LONG_MS, Flood, line  # noqa: E402
from scale_parts.pinger import pinging  # noqa: E402
from scale_parts.processes import PING, redis_server  # noqa: E402

from benchmarks.peers.processes import executes, free_port, pinned, serving  # noqa: E402

FLOODER = Path(__file__).parent / "fairness_parts" / "flooder.py"
GOAL_MS = 50.0
RATIO = 0.9
CONNECTIONS = (1, 50)
AFTER_END_S = 2.0
"""How long the pings continue, because the server may end the locks later."""


class Sample(NamedTuple):
    """The result of one flood: percentiles of the pings in ms, and replies a second."""

    median_ms: float
    p99_ms: float
    longest_ms: float
    rate: float


@contextmanager
def _server(genie: list[str], redis_port: int | None) -> Iterator[int]:
    """Start a server for the block, and yield its port."""
    port = free_port()
    own = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    own |= {"GENIE_PORT": str(port), "GENIE_ADMIN_PORT": "", "GENIE_LOG_LEVEL": "warning"}
    if redis_port is not None:
        own |= {"GENIE_REDIS_PORT": str(redis_port), "GENIE_NAMESPACE": f"fairness-{port}"}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving([*genie, "serve"], Path(folder) / "log", lambda: executes(port), environment=own),
    ):
        yield port


def _hold(port: int, resources: tuple[str, ...]) -> socket.socket:
    """Lock each of these resources; the locks are held as long as the returned socket is open."""
    sock = socket.create_connection(("127.0.0.1", port))
    for resource in resources:
        sock.sendall(line("request", resources=[resource], transactionTimeout=LONG_MS, onDisconnect="release"))
    answers = 0
    while answers < 2 * len(resources):
        answers += sock.recv(1 << 20).count(b"\n")
    return sock


def _measure(port: int, flood: Flood | None, connections: int, seconds: float) -> Sample:
    with ExitStack() as stack:
        if flood is not None:
            stack.enter_context(_hold(port, tuple(flood.held)))
        flooder = None if flood is None else stack.enter_context(_flooding(port, flood, connections))
        if flooder is not None:
            time.sleep(seconds / 4)
        pinger = stack.enter_context(pinging(port, PING))
        time.sleep(seconds)
        pinger.stop()
        rate = 0.0 if flooder is None else _rate(flooder)
        times = sorted(pinger.times_ms())
    return Sample(statistics.median(times), times[int(len(times) * 0.99)], times[-1], rate)


def _measure_end(port: int, end: End) -> Sample:
    with end.prepare(port) as act, pinging(port, PING) as pinger:
        time.sleep(0.3)
        act()
        time.sleep(AFTER_END_S)
        pinger.stop()
        times = sorted(pinger.times_ms())
    return Sample(statistics.median(times), times[int(len(times) * 0.99)], times[-1], 0.0)


@contextmanager
def _flooding(port: int, flood: Flood, connections: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(FLOODER), str(port), str(connections)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None  # noqa: S101
            assert process.stdout is not None  # noqa: S101
            process.stdin.write(flood.lines)
            process.stdin.close()
            process.stdin = None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def _rate(flooder: subprocess.Popen[bytes]) -> float:
    flooder.send_signal(signal.SIGTERM)
    said, _ = flooder.communicate()
    answers, took_s = json.loads(said)
    return float(answers / took_s)


class Build:
    """The command of one build's server, and the samples measured with it."""

    def __init__(self, command: list[str], redis_port: int | None) -> None:
        self._command = command
        self._redis_port = redis_port
        self.samples: dict[tuple[str, int], list[Sample]] = {}

    def measure(self, load: Flood | End | None, connections: int, seconds: float) -> None:
        """Measure one sample, with a new server: commands of an earlier flood may keep a server
        busy for long.
        """
        with _server(self._command, self._redis_port) as port:
            sample = _measure_end(port, load) if isinstance(load, End) else _measure(port, load, connections, seconds)
            self.samples.setdefault(_key(load, connections), []).append(sample)

    def middle(self, key: tuple[str, int]) -> Sample:
        """Return the medians of the samples."""
        return Sample(*(statistics.median(values) for values in zip(*self.samples[key], strict=True)))


def _key(load: Flood | End | None, connections: int) -> tuple[str, int]:
    return ("no flood" if load is None else load.name), connections


def _row(key: tuple[str, int], builds: list[Build]) -> tuple[str, bool]:
    """Return a line of the table, and whether the goals are met."""
    own = builds[0].middle(key)
    is_end = key[0] in {end.name for end in ENDS}
    met = (own.longest_ms if is_end else own.p99_ms) < GOAL_MS
    text = f"| {key[0]} | {key[1]} | {own.median_ms:.1f} | {own.p99_ms:.1f} | {own.longest_ms:.1f} | {own.rate:,.0f} |"
    if len(builds) > 1:
        base = builds[1].middle(key)
        pairs = zip(*(build.samples[key] for build in builds), strict=True)
        ratio = statistics.median(one.rate / other.rate if other.rate else 1.0 for one, other in pairs)
        met = met and ratio >= RATIO
        text += f" {base.p99_ms:.1f} | {base.longest_ms:.1f} | {ratio:.2f} |"
    return text + ("" if met else " missed"), met


def main() -> int:
    """Measure all floods, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", help="the floods whose names contain this")
    parser.add_argument("--redis", action="store_true", help="keep the locks in Redis")
    parser.add_argument("--base", help="the command `genie` of another build")
    options = parser.parse_args()
    floods = [flood for flood in FLOODS if not options.redis or flood.durable]
    loads: list[tuple[Flood | End, int]] = [(flood, number) for flood in floods for number in CONNECTIONS]
    loads += [(end, 1) for end in ENDS]
    loads = [(load, number) for load, number in loads if (options.only or "") in load.name]
    prefix, _, processor = pinned()
    commands = [[*prefix, sys.executable, "-m", "genie.cli"]]
    if options.base:
        commands.append([*prefix, *options.base.split()])
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    missed = 0
    with ExitStack() as stack:
        redis_port = stack.enter_context(redis_server()).port if options.redis else None
        builds = [Build(command, redis_port) for command in commands]
        print(
            "| flood | connections | ping, median ms | p99 | longest | answers/s |"
            + " base p99 | base longest | rate |" * bool(options.base)
        )
        print("| --- |" + " --: |" * (5 + 3 * bool(options.base)))
        for load, connections in [(None, 0), *loads]:
            for number in range(options.rounds):
                for build in builds if number % 2 else reversed(builds):
                    build.measure(load, connections, options.seconds)
            text, met = _row(_key(load, connections), builds)
            missed += not met
            print(text, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
