"""A Genie server inside a test, with the real clock or with a virtual one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from genie.config import Settings
from genie.server.app import Server
from genie.testing.faults import Fault
from genie.testing.lock_order import observed
from genie.testing.simulation.host import SharedProcess, SimMachine
from genie.testing.simulation.loop import NODE, SimLoop, deterministic
from genie.testing.simulation.network import Network
from genie.testing.world import World, has_running_loop

T = TypeVar("T")

ADDRESS = "127.0.0.1", 7077
"""The host and port of the server that `run` starts."""


def run(main: Coroutine[Any, Any, T], *, seed: int = 0, faults: Sequence[Fault] | None = None) -> T:
    """Run a coroutine like `asyncio.run`, with a virtual clock and a Genie server at 127.0.0.1:7077.

    `asyncio.sleep(3600)` returns at once. Afterwards `time.time` and `time.monotonic` are an hour later, and locks and
    waiting requests have timed out accordingly. `datetime` and `time.perf_counter` have the real time. `random`,
    `secrets`, `os.urandom` and `uuid.uuid4` depend only on the seed, so a run is reproducible.

    `genie.connect()` connects to this Genie server, regardless of environment variables. The network is in memory: only
    the Genie server and the servers that the coroutine starts can be reached. Locks are kept in memory and end with the
    run.

    If `faults`, a plan of faults, is not None, the world is larger: three Genie servers, which keep their locks in a
    simulated Redis, in a network whose delays depend on the seed. `process` starts processes of the service, which the
    faults break.

    Raises Stuck if the coroutine waits for an event that can never occur, or if tasks run without ever waiting.
    Blocking sockets are not simulated: to connect one, or a client of `genie.sync`, raises RuntimeError.
    """
    __tracebackhide__ = True  # pytest shows the line of the test instead
    if has_running_loop():
        main.close()
        raise RuntimeError(
            "genie.testing.run() can't be called from a running event loop: call it from a plain function"
        )
    if faults is not None:
        return World(seed, faults, observed(Settings().namespaces)).run(main)
    loop = SimLoop()
    network = Network(loop)
    server_node = loop.create_node("genie", ADDRESS[0])

    def is_logged_by_server(_level: str, _line: MutableMapping[str, Any]) -> bool:
        return NODE.get() is server_node

    ignored = dict.fromkeys(("GENIE_TOKEN", "GENIE_TOKEN_FILE", "GENIE_NAMESPACE"), "")
    environment = {"GENIE_HOST": ADDRESS[0], "GENIE_PORT": str(ADDRESS[1]), **ignored}
    with (
        deterministic(loop, seed, on_log=is_logged_by_server),  # the log lines of the server are dropped
        patch.dict(os.environ, environment),
    ):
        settings = Settings()
        server = Server(settings, machine=SimMachine(""), lock_orders=observed(settings.namespaces))
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_until_complete(loop.spawn(server_node, server.start()))
            try:
                return runner.run(main)
            finally:
                runner.get_loop().run_until_complete(loop.spawn(server_node, server.stop()))
                network.heal()


@asynccontextmanager
async def server(**settings: Any) -> AsyncIterator[tuple[str, int]]:
    """Run a Genie server in the running event loop, on a free port of 127.0.0.1.

    `async with genie.testing.server() as (host, port)` gives the address. `settings` are the options of `genie serve`,
    with underscores instead of hyphens. Without the option `redis_url` the server keeps locks in memory.
    """
    options = Settings.from_options(**{"port": 0} | settings)
    running = Server(options, machine=SharedProcess(), lock_orders=observed(options.namespaces))
    address = await running.start()
    try:
        yield address
    finally:
        await running.stop()
