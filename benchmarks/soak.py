"""A soak of real processes with faults, and a report page: rate, p99, memory over time, and the faults as marks.

    python benchmarks/soak.py [--seconds S] [--page FILE]

A Redis, two Genie servers (a leader and a follower) and 32 clients in this process run for S seconds. The clients use all kinds
of locks: exclusive, shared, units and a subtree. In turn the leader is killed, Redis is stopped for a second, and the follower is killed; a killed server is started again. The page needs no
network and no other file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import genie  # noqa: E402
from benchmarks.peers.processes import accepts, free_port  # noqa: E402

CLIENTS = 32
SHARED_KEYS = 8
POOL_UNITS = 8
KINDS = {"own name": 72, "exclusive": 10, "shared": 8, "units": 9, "subtree": 1}
"""What a client locks, with weights: a name of its own; one of `SHARED_KEYS` names that all clients use, in either mode; 1 to 3
of `POOL_UNITS` units of one resource; or all the shared names as a subtree."""
START_LIMIT_S = 30.0
WIDTH, HEIGHT, MARGIN = 900, 150, 60


@dataclass
class Samples:
    """What was measured once per second, and the faults."""

    at_s: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    """Cycles (lock and release) per second."""
    p99_ms: list[float] = field(default_factory=list)
    """The 99th percentile of the time until a lock is granted."""
    server_mib: list[float] = field(default_factory=list)
    """Resident memory of both servers."""
    redis_mib: list[float] = field(default_factory=list)
    """Resident memory of Redis."""
    faults: list[tuple[float, str]] = field(default_factory=list)
    errors: int = 0
    cycles: Counter[str] = field(default_factory=Counter)
    """The number of cycles of each of the `KINDS`."""


class Deployment:
    """A Redis and two servers as processes of this machine, in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._redis_port = free_port()
        self.ports = [free_port(), free_port()]
        self.redis = subprocess.Popen(
            [
                shutil.which("redis-server") or "redis-server",
                "--port",
                str(self._redis_port),
                "--appendonly",
                "yes",
                "--dir",
                str(folder),
            ],
            stdout=subprocess.DEVNULL,
        )
        self._wait_for(self._redis_port)
        self._admin_ports = [free_port(), free_port()]
        self.servers = [self._start(index) for index in range(len(self.ports))]
        for port in self.ports:
            self._wait_for(port)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        port, admin_port = self.ports[index], self._admin_ports[index]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
        own = {
            "GENIE_PORT": str(port),
            "GENIE_ADMIN_PORT": str(admin_port),
            "GENIE_LOG_LEVEL": "error",
            "PYTHONPATH": str(ROOT),
        }
        own["GENIE_REDIS_URL"] = f"redis://127.0.0.1:{self._redis_port}/0"
        log = (self._folder / f"{port}.log").open("ab")
        return subprocess.Popen([sys.executable, "-m", "genie.cli", "serve"], env=kept | own, stdout=log, stderr=log)

    def _wait_for(self, port: int) -> None:
        ends_at = time.monotonic() + START_LIMIT_S
        while True:
            try:
                accepts(port)
            except OSError:
                if time.monotonic() > ends_at:
                    sys.exit(f"nothing listens at port {port} after {START_LIMIT_S:.0f} s")
                time.sleep(0.05)
            else:
                return

    def find_leader(self) -> int:
        """Return the index of the server that leads; of the first one if none does."""
        for index, port in enumerate(self._admin_ports):
            try:
                with urlopen(f"http://127.0.0.1:{port}/leaderz", timeout=1):  # status 200
                    return index
            except OSError:
                continue
        return 0

    def kill(self, index: int) -> None:
        """Kill a server, and start it again at once."""
        self.servers[index].kill()
        self.servers[index].wait()
        self.servers[index] = self._start(index)

    def end(self) -> None:
        """End all processes."""
        for process in (*self.servers, self.redis):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


class Soak:
    """One run: the clients, the faults and the sampling."""

    def __init__(self, deployment: Deployment, seconds: float) -> None:
        self.samples = Samples()
        self._deployment = deployment
        self._address = ",".join(f"127.0.0.1:{port}" for port in deployment.ports)
        self._began = time.monotonic()
        self._ends_at = self._began + seconds
        self._fault_interval_s = max(3.0, seconds / 7)
        self._latencies_s: list[float] = []

    async def run(self) -> Samples:
        """Run until the time is over, and return the samples."""
        background = [asyncio.create_task(self._inject()), asyncio.create_task(self._sample())]
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._run_client(number))
        for task in background:
            if task.done():
                task.result()  # raises the error that ended it
            task.cancel()
        return self.samples

    async def _run_client(self, number: int) -> None:
        """Lock and release until the time is over. After an error, connect again."""
        while time.monotonic() < self._ends_at:
            try:
                async with genie.connect(self._address) as client:
                    await self._lock_and_release(client, number)
            except genie.GenieError:
                self.samples.errors += 1
                await asyncio.sleep(0.1)

    async def _lock_and_release(self, client: genie.Client, number: int) -> None:
        chance = random.Random()
        while time.monotonic() < self._ends_at:
            [kind] = chance.choices(list(KINDS), KINDS.values())
            lock = lock_of(kind, number, chance)
            asked = time.perf_counter()
            async with client.lock(lock, queue_timeout=5):
                self._latencies_s.append(time.perf_counter() - asked)
            self.samples.cycles[kind] += 1

    async def _inject(self) -> None:
        deployment = self._deployment
        for kind in cycle(("kill the leader", "stop Redis for 1 s", "kill the follower")):
            await asyncio.sleep(self._fault_interval_s)
            leader = await asyncio.to_thread(deployment.find_leader)
            self.samples.faults.append((time.monotonic() - self._began, kind))
            if kind.startswith("stop"):
                deployment.redis.send_signal(signal.SIGSTOP)
                await asyncio.sleep(1)
                deployment.redis.send_signal(signal.SIGCONT)
            else:
                await asyncio.to_thread(deployment.kill, leader if kind == "kill the leader" else 1 - leader)

    async def _sample(self) -> None:
        samples, deployment = self.samples, self._deployment
        while True:
            await asyncio.sleep(1)
            taken = sorted(self._latencies_s)
            self._latencies_s.clear()
            samples.at_s.append(time.monotonic() - self._began)
            samples.rate.append(float(len(taken)))
            samples.p99_ms.append(taken[len(taken) * 99 // 100] * 1000 if taken else 0.0)
            samples.server_mib.append(sum(resident_mib(server.pid) for server in deployment.servers))
            samples.redis_mib.append(resident_mib(deployment.redis.pid))


def lock_of(kind: str, number: int, chance: random.Random) -> str:
    """Return a random lock of one of the `KINDS` for the client with this number."""
    if kind == "own name":
        return f"own/{number}"
    if kind == "units":
        return genie.units("pool", chance.randint(1, 3), of=POOL_UNITS)
    if kind == "subtree":
        return genie.subtree("shared/")
    return f"{kind}:shared/{chance.randrange(SHARED_KEYS)}"


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def plot(title: str, samples: Samples, values: list[float]) -> str:
    """Return an SVG with one line over time, and a mark for each fault."""
    end, top = max(samples.at_s), max([*values, 1e-9]) * 1.1

    def x(at_s: float) -> float:
        return MARGIN + at_s / end * (WIDTH - MARGIN - 10)

    def y(value: float) -> float:
        return HEIGHT - 20 - value / top * (HEIGHT - 40)

    points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in zip(samples.at_s, values, strict=True))
    marks = "".join(
        f'<line class="fault" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="20" y2="{HEIGHT - 20}"><title>{escape(kind)}</title></line>'
        for at, kind in samples.faults
    )
    return (
        f'<h2>{escape(title)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<line class="axis" x1="{MARGIN}" x2="{WIDTH - 10}" y1="{HEIGHT - 20}" y2="{HEIGHT - 20}"/>{marks}'
        f'<polyline points="{points}"/><text x="{MARGIN - 6}" y="{y(max(values)) + 4:.1f}">{max(values):,.1f}</text>'
        f'<text x="{MARGIN - 6}" y="{HEIGHT - 16}">0</text><text x="{WIDTH - 10}" y="{HEIGHT - 4}">{end:,.0f} s</text></svg>'
    )


def report(samples: Samples) -> str:
    """Return the page."""
    plots = "".join(
        plot(title, samples, values)
        for title, values in (
            ("Cycles per second", samples.rate),
            ("Time until a lock is granted, 99th percentile, in ms", samples.p99_ms),
            ("Resident memory of both servers, in MiB", samples.server_mib),
            ("Resident memory of Redis, in MiB", samples.redis_mib),
        )
    )
    rows = "".join(f"<tr><td>{at:.1f} s</td><td>{escape(kind)}</td></tr>" for at, kind in samples.faults)
    counts = "".join(f"<tr><td>{kind}</td><td>{samples.cycles[kind]:,}</td></tr>" for kind in KINDS)
    style = (
        "body{font:14px system-ui,sans-serif;margin:2em auto;max-width:940px}h2{font-size:14px;margin:1.5em 0 0}"
        "svg{width:100%}polyline{fill:none;stroke:#175cd3;stroke-width:1.5}.axis{stroke:#98a2b3}"
        ".fault{stroke:#d92d20;stroke-dasharray:3 3}text{font-size:11px;fill:#667085;text-anchor:end}td{padding:2px 12px 2px 0}"
    )
    summary = f"{sum(samples.rate):,.0f} cycles, {len(samples.faults)} faults, {samples.errors:,} errors that clients have seen."
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Soak</title><style>{style}</style><h1>Soak</h1>'
        f"<p>{summary} The red lines are faults.</p>{plots}<h2>Cycles</h2><table>{counts}</table>"
        f"<h2>Faults</h2><table>{rows}</table></html>\n"
    )


def main() -> None:
    """Run the soak, and write the page."""
    parser = argparse.ArgumentParser(description="A soak of real processes with faults, and a report page.")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--page", type=Path, default=Path("build/soak.html"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder))
        try:
            samples = asyncio.run(Soak(deployment, options.seconds).run())
        finally:
            deployment.end()
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(report(samples))
    print(
        f"{sum(samples.rate):,.0f} cycles, {len(samples.faults)} faults, {samples.errors:,} errors; see {options.page}",
        *(f"{kind}: {count:,} cycles" for kind, count in samples.cycles.most_common()),
        sep="\n",
    )


if __name__ == "__main__":
    main()
