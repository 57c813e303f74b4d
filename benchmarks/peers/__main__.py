"""Measures all peers side by side: starts their servers, takes turns, and writes the table and the plot."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.etcd import Etcd
from benchmarks.peers.figures import Sample
from benchmarks.peers.genie_server import GenieClient, GenieMemory, GenieMemoryCompiled, GenieRedis, GenieRedisCompiled
from benchmarks.peers.live_mutex import LiveMutex
from benchmarks.peers.measure import SHAPES, measure
from benchmarks.peers.peer import Peer, PeerFailed
from benchmarks.peers.plot import plot
from benchmarks.peers.postgres import Postgres
from benchmarks.peers.processes import pinned
from benchmarks.peers.redis_py import RedisPy, RedisPyPipelined
from benchmarks.peers.redis_set import RedisSet
from benchmarks.peers.report import Report, filesystem, machine, pinning, today
from benchmarks.peers.slock import Slock
from benchmarks.peers.stopping import listen
from benchmarks.peers.table import errors, markdown, put

DOCS = Path(__file__).parents[2] / "docs"
PEERS: Sequence[Peer] = (
    GenieMemory(),
    GenieMemoryCompiled(),
    GenieRedis(),
    GenieRedisCompiled(),
    Slock(),
    LiveMutex(),
    Postgres(),
    RedisSet(),
    Etcd(),
    GenieClient(),
    RedisPy(),
    RedisPyPipelined(),
)
WARMUP_S = 0.3


class Run:
    """The rounds: the samples so far, and the peers that were skipped, with the reason."""

    def __init__(self, peers: Sequence[Peer], seconds: float, prefix: Sequence[str]) -> None:
        self.seconds = seconds
        self.prefix = prefix
        self.skipped = {peer.name: reason for peer in peers if (reason := peer.missing())}
        self.peers = [peer for peer in peers if peer.name not in self.skipped]
        self.versions: list[str] = []
        self.samples: dict[str, dict[str, list[Sample]]] = {
            shape.slug: {peer.name: [] for peer in self.peers if shape.depth in peer.depths} for shape in SHAPES
        }

    def round(self, number: int) -> None:
        """Measure every peer once, each round beginning with another one."""
        first = number % len(self.peers) if self.peers else 0
        for peer in [*self.peers[first:], *self.peers[:first]]:
            try:
                self._turn(peer)
            except PeerFailed as error:
                self.skipped[peer.name] = str(error)
                print(f"  {peer.name}: {error}", flush=True)

    def _turn(self, peer: Peer) -> None:
        """Measure one peer with new servers, under each load."""
        with tempfile.TemporaryDirectory(prefix="peers-") as root:
            Path(root).chmod(0o711)  # PostgreSQL runs as somebody else
            folder = Path(root) / "data"
            folder.mkdir()
            with peer.running(folder, self.prefix) as running:
                self.versions += [version for version in running.versions if version not in self.versions]
                for shape in (shape for shape in SHAPES if shape.depth in peer.depths):
                    sample = measure(peer, running, shape, self.seconds, WARMUP_S)
                    self.samples[shape.slug][peer.name].append(sample)
                    rate = sample.cycles / sample.seconds
                    print(f"  {peer.slug:12} {shape.slug}  {rate:8,.0f} cycles/s", flush=True)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=rounds, default=5, help="how often every peer is measured (default: 5)")
    parser.add_argument("--seconds", type=seconds, default=1.0, help="for how long, under each load (default: 1)")
    parser.add_argument(
        "--only", action="append", choices=[peer.slug for peer in PEERS], help="measure this peer; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="write every figure of every round into this file")
    parser.add_argument("--table", type=Path, help=f"page or file for the tables (default: docs/benchmarks.md){HERE}")
    parser.add_argument("--plot", type=Path, help=f"PNG for the plot (default: docs/benchmarks/peers.png){HERE}")
    return parser.parse_args(arguments)


def rounds(text: str) -> int:
    """Parse a number of rounds: at least 1."""
    if (found := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {text}")
    return found


def seconds(text: str) -> float:
    """Parse a duration in seconds: above 0 and finite."""
    found = float(text)
    if found <= 0 or not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"more than 0, not {text}")
    return found


HERE = "; with --only they are only written where you say so"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status, 1 after errors or if nothing could be measured."""
    if not sys.platform.startswith("linux"):
        sys.exit("This needs Linux: it uses epoll, processor affinity and /proc.")
    wanted = options(arguments)
    if not wanted.only:
        wanted.table = wanted.table or DOCS / "benchmarks.md"
        wanted.plot = wanted.plot or DOCS / "benchmarks" / "peers.png"
    listen()
    prefix, servers, load = pinned()
    if load is not None:
        os.sched_setaffinity(0, {load})
    run = Run([peer for peer in PEERS if not wanted.only or peer.slug in wanted.only], wanted.seconds, prefix)
    for number in range(wanted.rounds):
        print(f"round {number + 1} of {wanted.rounds}", flush=True)
        run.round(number)
    report = Report(
        today(),
        machine(),
        pinning(servers, load),
        filesystem(Path(tempfile.gettempdir())),
        wanted.rounds,
        wanted.seconds,
        WARMUP_S,
        run.versions,
        run.skipped,
        run.samples,
    )
    write(report, wanted)
    return 1 if errors(report) or not report.measured else 0


def write(report: Report, wanted: argparse.Namespace) -> None:
    """Print the tables, and write the requested files. Without a sample, existing pages and plots
    are not changed.
    """
    text = markdown(report)
    print(f"\n{text}")
    for line in errors(report):
        print(line)
    if wanted.json:
        wanted.json.write_text(report.json(), encoding="utf-8")
    if not report.measured:
        print("Nothing was measured: neither tables nor a plot are written.")
        return
    if wanted.table:
        put(text, wanted.table)
    if wanted.plot:
        try:
            plot(report, wanted.plot)
        except ImportError:
            print("No plot: matplotlib is not installed (pip install 'genie-lock[bench]').")


if __name__ == "__main__":
    sys.exit(main())
