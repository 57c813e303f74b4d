"""The adapter of the client for threads: `python -m conformance.adapters.thread_client`.

Each call runs in a thread of its own. The main thread executes requests, because only there a waiting call can be cancelled
by a signal, as Ctrl-C does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from itertools import count
from types import FrameType
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
from genie import sync
from genie.client.sync import Watch

LOSS_POLL_INTERVAL_S = 0.01


class Adapter:
    """Executes the calls of the runner."""

    def __init__(self) -> None:
        self.client: sync.Client | None = None
        self.numbers = count(1)
        self.locks: dict[int, sync.Lock] = {}
        self.unreported: dict[int, sync.Lock] = {}
        """The locks whose loss was not reported."""
        self.watches: dict[int, tuple[Watch, threading.Event]] = {}
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """The requests for the main thread."""
        self.main_call: int | None = None
        """The number of the call that the main thread executes, or that it will execute next."""
        self.cancelled: int | None = None
        """The call to cancel."""

    # -- threads ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Execute calls until `exit`. Called in the main thread."""
        signal.signal(signal.SIGUSR1, self.on_signal)
        threading.Thread(target=self.read_calls, daemon=True).start()
        threading.Thread(target=self.report_losses, daemon=True).start()
        while True:
            self.execute(self.requests.get())
            self.main_call = None

    def read_calls(self) -> None:
        """Start each call in a thread."""
        for line in sys.stdin:
            call = json.loads(line)
            if call["do"] == "exit":
                write({"call": call["call"], "ok": {}})
                break
            if call["do"] == "acquire" and self.main_call is None:
                self.main_call = call["call"]
                self.requests.put(call)
            else:
                threading.Thread(target=self.execute, args=(call,), daemon=True).start()
        os._exit(0)

    def execute(self, call: dict[str, Any]) -> None:
        """Execute a call and answer it."""
        number = call["call"]
        try:
            result = getattr(self, f"do_{call['do']}")(call)
        except KeyboardInterrupt:
            write({"call": number, "error": {"type": "cancelled"}})
        except Exception as error:  # noqa: BLE001 - reported to the runner
            write({"call": number, "error": error_result(error)})
        else:
            write({"call": number, "ok": result})

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the call of the main thread if it is to be cancelled."""
        del number, frame
        if self.main_call is not None and self.main_call == self.cancelled:
            self.cancelled = None
            raise KeyboardInterrupt

    def report_losses(self) -> None:
        """Write an event for each lock that is lost."""
        while True:
            for number, lock in list(self.unreported.items()):
                if lock.lost.is_set() and self.unreported.pop(number, None) is not None:
                    error = lock._request.error  # noqa: SLF001 - the event of a lock does not carry the reason
                    write({"event": "lost", "lock": number, "type": "lost" if error is None else error_type(error)})
            time.sleep(LOSS_POLL_INTERVAL_S)

    # -- calls --------------------------------------------------------------------------------------------

    def do_connect(self, call: dict[str, Any]) -> dict[str, Any]:
        client = sync.connect(**connect_arguments(call["addresses"], call.get("options") or {}))
        client.__enter__()
        self.client = client
        return {}

    def opened(self) -> sync.Client:
        """Return the client."""
        if self.client is None:
            raise genie.ConnectionLost("the client was closed")
        return self.client

    def do_acquire(self, call: dict[str, Any]) -> dict[str, Any]:
        return self.added(self.opened().acquire(*call["resources"], **request_arguments(call)))

    def do_tryAcquire(self, call: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 - named after the call
        lock = self.opened().try_acquire(*call["resources"], **request_arguments(call))
        return {"lock": None} if lock is None else self.added(lock)

    def do_acquireAny(self, call: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 - named after the call
        return self.added(self.opened().acquire_any(call["anyOf"], **request_arguments(call)))

    def added(self, lock: sync.Lock) -> dict[str, Any]:
        """Number a lock, and report its loss."""
        number = next(self.numbers)
        self.locks[number] = self.unreported[number] = lock
        return lock_result(number, lock)

    def do_release(self, call: dict[str, Any]) -> dict[str, Any]:
        lock = self.locks[call["lock"]]
        lock.release()
        if not lock.lost.is_set():
            self.unreported.pop(call["lock"], None)
        return {}

    def do_extend(self, call: dict[str, Any]) -> dict[str, Any]:
        self.locks[call["lock"]].extend(call["transactionTimeout"] / 1000)
        return {}

    def do_ping(self, _: dict[str, Any]) -> dict[str, Any]:
        self.opened().ping()
        return {}

    def do_inspect(self, call: dict[str, Any]) -> dict[str, Any]:
        filters = {key: call.get(key) for key in ("resource", "id", "limit", "only")}
        return inspection_result(self.opened().inspect(transaction=call.get("transactionName"), **filters))

    def do_watch(self, call: dict[str, Any]) -> dict[str, Any]:
        number, unpaused = next(self.numbers), threading.Event()
        watch = self.opened().watch(call["prefix"]).__enter__()
        if not call.get("paused"):
            unpaused.set()
        self.watches[number] = watch, unpaused
        threading.Thread(target=self.report_changes, args=(number, watch, unpaused), daemon=True).start()
        return {"watch": number}

    def report_changes(self, number: int, watch: Watch, unpaused: threading.Event) -> None:
        """Write an event for each change of a watch."""
        unpaused.wait()
        for change in watch:
            write(change_event(number, change))

    def do_resume(self, call: dict[str, Any]) -> dict[str, Any]:
        self.watches[call["watch"]][1].set()
        return {}

    def do_unwatch(self, call: dict[str, Any]) -> dict[str, Any]:
        self.watches[call["watch"]][0].close()
        return {}

    def do_cancel(self, call: dict[str, Any]) -> dict[str, Any]:
        self.cancelled = call["target"]
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return {}

    def do_close(self, _: dict[str, Any]) -> dict[str, Any]:
        client, self.client = self.client, None
        if client is not None:
            client.close()
        self.unreported.clear()
        return {}


if __name__ == "__main__":
    Adapter().run()
