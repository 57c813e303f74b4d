"""Compares the speed of the working tree with that of another commit, or with its own without a setting.

    make bench-against BASE=<commit>
    python benchmarks/against.py --setting GENIE_HISTORY_DIR={folder}/history

Both servers run at the same time on one processor, and the load on the other one. In each round, each shape of load is
executed on one server and then immediately on the other one. The ratios of both measurements are printed: their median of
all rounds, and their range. So other load of the machine affects both sides alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.against_parts.builds import Build, of_commit, of_working_tree
from benchmarks.against_parts.load import SHAPES, UNIT_SHAPES, Sample, measure
from benchmarks.peers.peer import HOST, PeerFailed
from benchmarks.peers.processes import executes, free_port, pinned, serving
from benchmarks.peers.redis_server import missing, redis_server
from benchmarks.peers.report import machine
from benchmarks.peers.stopping import listen

LOAD_BOUND = 0.95
"""If the load uses more than this share of its processor, it may have limited the rate."""


@dataclass
class Pairs:
    """The measurements of one shape: the base and the working tree, in pairs."""

    pairs: list[tuple[Sample, Sample]] = field(default_factory=list)

    def row(self, title: str) -> str:
        """Return a row of the table."""
        rates = [new.rate / old.rate for old, new in self.pairs]
        cpu = [new.server_us / old.server_us for old, new in self.pairs]
        old_rate, new_rate = (statistics.median(pair[side].rate for pair in self.pairs) for side in (0, 1))
        old_us, new_us = (statistics.median(pair[side].server_us for pair in self.pairs) for side in (0, 1))
        busy = statistics.median(sample.load_share for pair in self.pairs for sample in pair)
        mark = " (the load limits the rate)" if busy >= LOAD_BOUND else ""
        return (
            f"{title:24}{old_rate:10,.0f}{new_rate:10,.0f}  {statistics.median(rates):5.2f}  "
            f"({min(rates):.2f} to {max(rates):.2f}){old_us:8.1f}{new_us:8.1f}  {statistics.median(cpu):5.2f}  "
            f"({min(cpu):.2f} to {max(cpu):.2f}){busy:7.0%}{mark}"
        )


HEADER = (
    f"{'':24}{'cycles/s':>20}  {'ratio':>5}  {'':16}{'CPU a cycle, us':>16}  {'ratio':>5}  {'':14}{'load':>7}\n"
    f"{'':24}{'base':>10}{'now':>10}  {'':5}  {'(range)':16}{'base':>8}{'now':>8}  {'':5}  {'(range)':14}{'busy':>7}"
)


@contextmanager
def server(
    build: Build, folder: Path, prefix: Sequence[str], redis_port: int | None, settings: Mapping[str, str]
) -> Iterator[tuple[int, int]]:
    """Start a server of a build with further settings; yield its port and its process id."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GENIE_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(build.folder), "GENIE_HOST": HOST, "GENIE_PORT": str(port)}
    environment |= {"GENIE_ADMIN_PORT": "", "GENIE_LOG_LEVEL": "warning"}
    if redis_port is not None:
        environment |= {"GENIE_REDIS_HOST": HOST, "GENIE_REDIS_PORT": str(redis_port)}
    environment |= {name: value.replace("{folder}", str(folder)) for name, value in settings.items()}
    command = [*prefix, sys.executable, "-m", "genie.cli", "serve"]
    with serving(command, folder / "genie.log", lambda: executes(port), environment=environment) as pid:
        yield port, pid


def run_round(
    number: int,
    store: str,
    builds: Sequence[Build],
    options: argparse.Namespace,
    prefix: Sequence[str],
    load_processor: int | None,
) -> list[list[Sample]]:
    """Start both servers, and measure each shape on both. Returns the samples of each shape, in the order of the builds."""
    redis_prefix = () if load_processor is None else ("taskset", "-c", str(load_processor))
    results: list[list[Sample]] = []
    with ExitStack() as servers, tempfile.TemporaryDirectory(prefix="against-", ignore_cleanup_errors=True) as root:
        addresses = []
        for index, build in enumerate(builds):
            folder, redis_port = Path(root) / f"server-{index}", None
            folder.mkdir()
            if store == "redis":  # one for each, because the formats of the builds may differ
                redis_folder = Path(root) / f"redis-{index}"
                redis_folder.mkdir()
                redis_port = servers.enter_context(redis_server(redis_folder, redis_prefix)).port
            settings = dict(options.setting) if index else {}
            addresses.append(servers.enter_context(server(build, folder, prefix, redis_port, settings)))
        for shape in options.shapes:
            order = [0, 1] if number % 2 == 0 else [1, 0]
            samples = {index: measure(*addresses[index], shape, options.seconds, options.warm_up) for index in order}
            results.append([samples[0], samples[1]])
        servers.close()
    return results


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.startswith("GENIE_"):
        raise argparse.ArgumentTypeError(f"{text!r} must be GENIE_NAME=VALUE")
    return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Build both sides, run the rounds, and print the table."""
    parser = argparse.ArgumentParser("python benchmarks/against.py", description=__doc__)
    parser.add_argument(
        "base", nargs="?", help="the commit to compare with; without it, the working tree without the --setting"
    )
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="an environment variable of the server of the working tree; {folder} in its value is a temporary folder",
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each shape is measured (default: 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a measurement (default: 1)")
    parser.add_argument("--warm-up", type=float, default=0.3, help="time before a measurement (default: 0.3)")
    parser.add_argument("--store", action="append", choices=["memory", "redis"], help="default: both")
    parser.add_argument("--compiled", action="store_true", help="compile both sides (needs a C compiler)")
    parser.add_argument(
        "--units",
        action="store_const",
        dest="shapes",
        const=SHAPES + UNIT_SHAPES,
        default=SHAPES,
        help="also measure units of a resource, which both sides must know",
    )
    options = parser.parse_args(arguments)
    if not options.base and not options.setting:
        parser.error("give a commit, a --setting, or both")
    listen()
    now = of_working_tree(compiled=options.compiled)
    base = of_commit(options.base, compiled=options.compiled) if options.base else now
    prefix, servers, load = pinned()
    settings = "".join(f", {name}={value}" for name, value in options.setting)
    print(f"base: {base.title} ({base.kind})\nnow:  {now.title} ({now.kind}{settings})\n{machine()}")
    if load is not None:
        os.sched_setaffinity(0, {load})
        print(f"servers on processor {servers}, load and Redis on processor {load}, rounds: {options.rounds}")
    if not options.store and (reason := missing()):
        print(f"without Redis: {reason}")
        options.store = ["memory"]
    print(f"\n{HEADER}")
    for store in options.store or ["memory", "redis"]:
        tables = [Pairs() for _ in options.shapes]
        try:
            for number in range(options.rounds):
                results = run_round(number, store, [base, now], options, prefix, load)
                for table, samples in zip(tables, results, strict=True):
                    table.pairs.append((samples[0], samples[1]))
        except PeerFailed as error:
            print(f"{store}: {error}")
            return 1
        for shape, table in zip(options.shapes, tables, strict=True):
            print(table.row(f"{store}, {shape.title}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
