"""The adapter of the asyncio client: `python -m conformance.adapters.asyncio_client`."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from typing import Any

import genie
from conformance.adapters.common import (
    change_event,
    connect_arguments,
    error_result,
    error_type,
    inspection_result,
    lock_result,
    request_arguments,
    write,
)
from genie.client.aio import Watch


class Adapter:
    """Executes the calls of the runner."""

    def __init__(self) -> None:
        self.client: genie.Client | None = None
        self.numbers = count(1)
        self.locks: dict[int, genie.Lock] = {}
        self.watches: dict[int, tuple[Watch, asyncio.Event]] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """The open calls."""
        self.background: set[asyncio.Task[None]] = set()
        """The tasks that report lost locks and changes."""

    async def execute(self, call: dict[str, Any]) -> None:
        """Execute a call and answer it."""
        number = call["call"]
        try:
            result = await getattr(self, f"do_{call['do']}")(call)
        except asyncio.CancelledError:
            write({"call": number, "error": {"type": "cancelled"}})
        except Exception as error:  # noqa: BLE001 - reported to the runner
            write({"call": number, "error": error_result(error)})
        else:
            write({"call": number, "ok": result})
        finally:
            self.tasks.pop(number, None)

    async def do_connect(self, call: dict[str, Any]) -> dict[str, Any]:
        client = genie.connect(**connect_arguments(call["addresses"], call.get("options") or {}))
        await client.__aenter__()
        self.client = client
        return {}

    def opened(self) -> genie.Client:
        """Return the client."""
        if self.client is None:
            raise genie.ConnectionLost("the client was closed")
        return self.client

    async def do_acquire(self, call: dict[str, Any]) -> dict[str, Any]:
        return self.added(await self.opened().acquire(*call["resources"], **request_arguments(call)))

    async def do_tryAcquire(self, call: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 - named after the call
        lock = await self.opened().try_acquire(*call["resources"], **request_arguments(call))
        return {"lock": None} if lock is None else self.added(lock)

    async def do_acquireAny(self, call: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 - named after the call
        return self.added(await self.opened().acquire_any(call["anyOf"], **request_arguments(call)))

    def added(self, lock: genie.Lock) -> dict[str, Any]:
        """Number a lock, and report its loss."""
        number = next(self.numbers)
        self.locks[number] = lock
        self.in_background(self.report_loss(number, lock))
        return lock_result(number, lock)

    async def report_loss(self, number: int, lock: genie.Lock) -> None:
        """Write an event when the lock is lost."""
        await lock.lost.wait()
        error = lock._request.error  # noqa: SLF001 - the event of a lock does not carry the reason
        write({"event": "lost", "lock": number, "type": "lost" if error is None else error_type(error)})

    async def do_release(self, call: dict[str, Any]) -> dict[str, Any]:
        await self.locks[call["lock"]].release()
        return {}

    async def do_extend(self, call: dict[str, Any]) -> dict[str, Any]:
        await self.locks[call["lock"]].extend(call["transactionTimeout"] / 1000)
        return {}

    async def do_ping(self, _: dict[str, Any]) -> dict[str, Any]:
        await self.opened().ping()
        return {}

    async def do_inspect(self, call: dict[str, Any]) -> dict[str, Any]:
        filters = {key: call.get(key) for key in ("resource", "id", "limit", "only")}
        return inspection_result(await self.opened().inspect(transaction=call.get("transactionName"), **filters))

    async def do_watch(self, call: dict[str, Any]) -> dict[str, Any]:
        number, unpaused = next(self.numbers), asyncio.Event()
        watch = await self.opened().watch(call["prefix"]).__aenter__()
        if not call.get("paused"):
            unpaused.set()
        self.watches[number] = watch, unpaused
        self.in_background(self.report_changes(number, watch, unpaused))
        return {"watch": number}

    async def report_changes(self, number: int, watch: Watch, unpaused: asyncio.Event) -> None:
        """Write an event for each change of a watch."""
        await unpaused.wait()
        async for change in watch:
            write(change_event(number, change))

    async def do_resume(self, call: dict[str, Any]) -> dict[str, Any]:
        self.watches[call["watch"]][1].set()
        return {}

    async def do_unwatch(self, call: dict[str, Any]) -> dict[str, Any]:
        await self.watches[call["watch"]][0].aclose()
        return {}

    async def do_cancel(self, call: dict[str, Any]) -> dict[str, Any]:
        task = self.tasks.get(call["target"])
        if task is not None:
            task.cancel()
        return {}

    async def do_close(self, _: dict[str, Any]) -> dict[str, Any]:
        client, self.client = self.client, None
        if client is not None:
            await client.close()
        for task in self.background:
            task.cancel()
        return {}

    def in_background(self, coroutine: Any) -> None:
        """Run a coroutine until the client is closed."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.background.add(task)
        task.add_done_callback(self.background.discard)


async def main() -> None:
    """Execute calls until `exit`."""
    loop, adapter = asyncio.get_running_loop(), Adapter()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        call = json.loads(line)
        if call["do"] == "exit":
            write({"call": call["call"], "ok": {}})
            break
        adapter.tasks[call["call"]] = loop.create_task(adapter.execute(call))


if __name__ == "__main__":
    asyncio.run(main())
