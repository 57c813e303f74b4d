"""Redis and Genie as real processes: single, with replicas, as a cluster; and nodes with balanced
leadership.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson
from redis import Redis
from redis.crc import key_slot

from benchmarks.peers.peer import HOST, open_socket
from benchmarks.peers.processes import accepts, executes, free_port, pinned, serving

ROOT = Path(__file__).resolve().parents[2]
BUS = 10_000
"""Offset of the port of a cluster's bus from the port for clients."""
SLOTS = 16_384
WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Running:
    """A port and the process that listens on it."""

    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class Setup:
    """Nodes that lead namespaces, and the Redis processes that store them."""

    name: str
    namespaces: Sequence[str]
    nodes: Sequence[Running]
    redises: Sequence[Running]
    loads: Sequence[int | None] = (None,)
    """The processors on which the loads of the namespaces run, in turn; None: that of the
    benchmark, if it has its own.
    """

    @property
    def hosts(self) -> str:
        """The addresses of all nodes."""
        return ",".join(f"{HOST}:{node.port}" for node in self.nodes)


def on(processor: int | None) -> Sequence[str]:
    """Return the command prefix that pins a process to a processor; None: to that of all servers,
    if they have their own.
    """
    return pinned()[0] if processor is None else ("taskset", "-c", str(processor))


def redis_server(
    stack: ExitStack, folder: Path, *options: str, below: int = 65_536, processor: int | None = None
) -> Running:
    """Start a Redis with an append-only file."""
    port = free_port(below)
    where = folder / f"redis-{port}"
    where.mkdir()
    command = [*on(processor), "redis-server", "--port", str(port), "--bind", HOST, "--dir", str(where), "--save", ""]
    command += ["--appendonly", "yes", "--repl-diskless-sync-delay", "0", *options]
    return Running(port, stack.enter_context(serving(command, where / "log", lambda: accepts(port))))


def replicated(stack: ExitStack, folder: Path, replicas: int, *options: str) -> list[Running]:
    """Start a primary, which comes first in the result, and its replicas; wait until they are
    synchronized.
    """
    master = redis_server(stack, folder, *options)
    follow = ("--replicaof", f"{HOST} {master.port}")
    others = [redis_server(stack, folder, *follow, *options) for _ in range(replicas)]
    with Redis(port=master.port) as client:
        client.set("begun", 1)
        until("the replicas follow", lambda: client.wait(replicas, 1_000) == replicas)
    return [master, *others]


def cluster(stack: ExitStack, folder: Path, masters: int) -> list[Running]:
    """Start primaries without replicas that share the slots of a cluster."""
    mode = ("--cluster-enabled", "yes")
    found = [redis_server(stack, folder, *mode, below=65_536 - BUS) for _ in range(masters)]
    nodes = [f"{HOST}:{node.port}" for node in found]
    made = ["redis-cli", "--cluster", "create", *nodes, "--cluster-yes"]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    for node in found:
        with Redis(port=node.port) as client:
            until("the cluster is up", partial(_is_up, client))
    return found


def _is_up(client: Redis) -> bool:
    return b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")


def names(number: int) -> list[str]:
    """Return names of namespaces of which each primary of a cluster stores one."""
    return [
        next(name for i in range(SLOTS) if key_slot((name := f"n{i}").encode()) * number // SLOTS == part)
        for part in range(number)
    ]


def node(
    stack: ExitStack, folder: Path, url: str, namespaces: Sequence[str], processor: int | None = None, **variables: str
) -> Running:
    """Start a server of these namespaces, and wait until it knows the leader of one."""
    port = free_port()
    command = [*on(processor), sys.executable, "-m", "genie.cli", "serve", "--port", str(port), "--admin-port", ""]
    variables |= {"GENIE_REDIS_URL": url, "GENIE_NAMESPACES": ",".join(namespaces), "GENIE_LOG_LEVEL": "warning"}
    log = folder / f"genie-{port}.log"
    return Running(
        port, stack.enter_context(serving(command, log, lambda: executes(port), environment=environment() | variables))
    )


def spread(setup: Setup) -> Setup:
    """Wait until the numbers of namespaces that the nodes lead differ by at most one."""

    def even() -> bool:
        counts = [sum(leads(node.port, name) for name in setup.namespaces) for node in setup.nodes]
        return sum(counts) == len(setup.namespaces) and max(counts) - min(counts) <= 1

    until("the namespaces are spread", even)
    return setup


def leads(port: int, namespace: str) -> bool:
    """Return whether a node leads a namespace."""
    with open_socket(port) as sock, sock.makefile("rb") as lines:
        sock.sendall(orjson.dumps({"command": "hello", "payload": {"namespace": namespace}}) + b"\n")
        return bool(orjson.loads(lines.readline())["command"] == "welcome")


def until(what: str, true: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    end = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {WAIT_S:.0f} s")
        time.sleep(0.05)


def environment() -> dict[str, str]:
    """Return the environment without variables that would change the settings of a server or a
    load.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    return kept | {"PYTHONPATH": str(ROOT)}
