"""For the tests of services that use Genie: a server inside the test, with the real clock or with a virtual one."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast
from unittest.mock import patch

from genie.config import Settings
from genie.server.app import Server
from genie.testing.simulation.loop import NODE, SimLoop, deterministic
from genie.testing.simulation.network import Network, SimSocket

T = TypeVar("T")

ADDRESS = "127.0.0.1", 7077


def run(main: Coroutine[Any, Any, T], *, seed: int = 0) -> T:
    """Run a coroutine as `asyncio.run` does, with a Genie server at 127.0.0.1:7077, where waiting takes no time.

    The clock is virtual: `asyncio.sleep(3600)` returns at once, `time.time` and `time.monotonic` say that an hour has
    passed, and locks and queues time out accordingly. (`datetime`, `time.perf_counter` and what else asks the machine
    itself does not.) `random` and `secrets` follow the seed, so that a run repeats itself exactly.

    `genie.connect()` goes to that server, whatever the environment says. The network is in memory: connections go to
    servers that were started in the coroutine, and to Genie. Threads have no part in this: their sockets would be real, so
    that connecting one (as `genie.sync` does) raises RuntimeError. A coroutine that waits for what can't come raises
    `Stuck`. Locks are kept in memory and end with the run.
    """
    if _runs():
        main.close()
        raise RuntimeError("genie.testing.run makes an event loop of its own: call it from a plain function")
    loop = SimLoop()
    network = Network(loop)
    genie = loop.node("genie", ADDRESS[0])

    def log(_level: str, _line: MutableMapping[str, Any]) -> bool:
        return NODE.get() is genie

    unset = dict.fromkeys(("GENIE_TOKEN", "GENIE_TOKEN_FILE", "GENIE_NAMESPACE"), "")
    here = {"GENIE_HOST": ADDRESS[0], "GENIE_PORT": str(ADDRESS[1]), **unset}
    with (
        deterministic(loop, seed, log),
        patch.dict(os.environ, here),
        patch("socket.create_connection", _no_real_socket),
    ):
        server = Server(Settings(), bind_to=lambda *address: cast("socket.socket", SimSocket(address)))
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_until_complete(loop.spawn(genie, server.start()))
            try:
                return runner.run(main)
            finally:
                runner.get_loop().run_until_complete(loop.spawn(genie, server.stop()))
                network.heal()


def _runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _no_real_socket(address: object, *_: object, **__: object) -> socket.socket:
    raise RuntimeError(
        f"in genie.testing.run nothing real can be connected to, like {address}: use genie.testing.server"
    )


@asynccontextmanager
async def server(**settings: Any) -> AsyncIterator[tuple[str, int]]:
    """A Genie server in the running event loop, on a free port of 127.0.0.1.

    Entered with `async with`, it gives its host and its port. `settings` are those of `genie serve`, with underscores.
    Locks are kept in memory where they don't say otherwise.
    """
    threshold = gc.get_threshold()
    running = Server(Settings.from_options(**{"port": 0} | settings))
    address = await running.start()
    try:
        yield address
    finally:
        await running.stop()
        gc.unfreeze()
        gc.set_threshold(*threshold)
