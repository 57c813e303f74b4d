"""Counts the work of the asyncio client for one cycle: `python -m work.client TASKS` prints it as JSON.

A cycle is `async with client.lock(…)`. The client and a server in memory run in one event loop, while time stands still. So
the clients of all tasks take turns in a fixed order, and no timer fires.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from work.clock import Clock  # isort: skip - replaces `time.monotonic` before other modules import it

import genie
from genie.config import Settings
from genie.observability import logs
from genie.server.app import Server
from work.opcodes import OpcodeCounter

PACKAGE = Path(genie.__file__).parent
COUNTED = tuple(str(PACKAGE / name) for name in ("client", "protocol/messages.py", "protocol/codec.py"))
"""The files whose instructions are counted: only the client executes them in this process."""
WARM_UP, CYCLES = 4, 8
"""Cycles of each of 64 tasks. A task that is alone executes as many as 64 tasks."""


async def measure(tasks: int) -> dict[str, float]:
    """Execute cycles of some tasks, and return the counts for one cycle."""
    server = Server(Settings.from_options(port=0))
    host, port = await server.start()
    counter = OpcodeCounter(lambda name: not name.startswith(COUNTED))
    rounds = 64 // tasks

    async with genie.connect(host, port) as client:

        async def work(number: int, cycles: int) -> None:
            for _ in range(cycles):
                async with client.lock(f"accounts/{number}"):
                    pass

        async def run(cycles: int) -> None:
            await asyncio.gather(*(work(number, cycles * rounds) for number in range(tasks)))

        Clock.freeze()
        handler = client._connection._handler
        assert handler is not None
        transport, writes = handler.transport, []
        handler.transport = SimpleNamespace(write=lambda data: (writes.append(data), transport.write(data)))
        await run(WARM_UP)
        writes.clear()
        gc.collect()
        gc.disable()
        counter.start()
        await run(CYCLES)
        counter.stop()
        handler.transport = transport
        Clock.thaw()
    await server.stop()
    cycles = CYCLES * rounds * tasks
    return {"opcodes": counter.count / cycles, "writes": len(writes) / cycles}


def main(tasks: int) -> None:
    """Count in this process, and print the counts."""
    logs.configure("error", "json")
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        print(json.dumps(runner.run(measure(tasks))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
