"""Interruptions: an exception at every line of the client for threads, and a cancellation at every await of the other.

A signal handler may raise an exception between any two instructions of a caller: Ctrl-C, a soft time limit, an alarm. After
each of them the exception that comes out is the caller's own, nothing is held that the caller does not know, and the client
works.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import genie as genie_package
from genie import QueueTimeout, RequestRejected, shared, sync
from support.processes.servers import WAIT_S, Genie

PACKAGE = str(Path(genie_package.__file__).parent)
NAME = "interrupted/lock"
HELD = "interrupted-held"
MAX_LINES = 400
"""More lines than any call executes, so that a loop over them ends."""


class Interruption(TimeoutError, RuntimeError):
    """What the signal handler of a program raises: an error of kinds that the client also raises or handles itself."""


@pytest.fixture
def other(genie: Genie) -> Iterator[sync.Client]:
    with sync.connect(*genie.address) as client:
        yield client


@pytest.fixture(autouse=True)
def _dump_blocked_threads() -> Iterator[None]:
    """End the process with a traceback of all threads instead of blocking for ever."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def interrupted_at(number: int) -> Iterator[list[str]]:
    """Raise an Interruption at a line of the package, the `number`-th that this thread executes. Yields a list with the line."""
    reached: list[str] = []
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            count += 1
            if count == number:
                reached.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
                raise Interruption
        return trace

    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(None)


Known = list[sync.Lock]
"""The locks that the caller knows."""


def block(client: sync.Client, _: Known) -> None:
    with client.lock(NAME, transaction_timeout=600, watchdog=True):
        pass


def elect(client: sync.Client, _: Known) -> None:
    with client.elect(NAME):
        pass


def acquire(client: sync.Client, known: Known) -> None:
    known.append(client.acquire(NAME, transaction_timeout=600, watchdog=True))


def try_acquire(client: sync.Client, known: Known) -> None:
    lock = client.try_acquire(NAME, transaction_timeout=600)
    assert lock is not None
    known.append(lock)


def acquire_any(client: sync.Client, known: Known) -> None:
    known.append(client.acquire_any([NAME], 1, transaction_timeout=600))


def time_out(client: sync.Client, _: Known) -> None:
    with contextlib.suppress(QueueTimeout):
        client.acquire(HELD, queue_timeout=0)


def transaction(client: sync.Client, _: Known) -> None:
    with client.transaction(transaction_timeout=600, watchdog=True) as tx:
        tx.lock(NAME)
        tx.lock("interrupted/second", shared(NAME))


def run_transaction(client: sync.Client, _: Known) -> None:
    client.run_transaction(lambda tx: tx.lock(NAME), transaction_timeout=600, watchdog=True)


def release(_: sync.Client, known: Known) -> None:
    known[0].release()


def release_by_id(client: sync.Client, known: Known) -> None:
    client.release(known[0].id)


def extend(_: sync.Client, known: Known) -> None:
    known[0].extend(600)


def detach(_: sync.Client, known: Known) -> None:
    known[0].detach()


def ping(client: sync.Client, _: Known) -> None:
    client.ping()


def inspect(client: sync.Client, _: Known) -> None:
    client.inspect(resource=NAME)


def watch(client: sync.Client, _: Known) -> None:
    with client.watch(HELD) as changes:
        next(changes)


def wait_for_loss(_: sync.Client, known: Known) -> None:
    known[0].lost.wait(0.001)


FINDS_THE_LOCK_FREE = [
    *(block, elect, acquire, try_acquire, acquire_any, time_out, ping, inspect, watch),
    *(transaction, run_transaction),
]
FINDS_THE_LOCK_HELD = [release, release_by_id, extend, detach, wait_for_loss]


@pytest.mark.parametrize("call", [*FINDS_THE_LOCK_FREE, *FINDS_THE_LOCK_HELD])
def test_an_exception_at_any_line_of_a_call(genie, other, call):
    other.acquire(HELD, transaction_timeout=600)
    with sync.connect(*genie.address) as client:
        for number in range(1, MAX_LINES):
            known = [client.acquire(NAME, transaction_timeout=600)] if call in FINDS_THE_LOCK_HELD else []
            ids = [lock.id for lock in known]
            with interrupted_at(number) as reached:
                try:
                    call(client, known)
                except Interruption:
                    pass
                except BaseException as error:
                    raise AssertionError(f"at {reached} the caller got {error!r}") from error
            check_after(client, other, known, ids, reached)
            if not reached:
                break
    assert 2 < number < MAX_LINES, "an exception at each line"
    other.release(other.inspect(resource=HELD).holders[0].id)


def check_after(client: sync.Client, other: sync.Client, known: Known, ids: list[int], reached: list[str]) -> None:
    """Check that nothing is held but what the caller knows, that nothing is watched, and that the client works."""
    gc.collect()  # the traceback of the exception has kept objects of the call alive
    for lock in known:
        if lock.held:
            lock.release()
    for id in ids:
        with contextlib.suppress(RequestRejected):  # a detached lock
            other.release(id)
    client.ping()
    free = other.acquire(NAME, "interrupted/second", queue_timeout=WAIT_S)  # granted as soon as nothing is left
    free.release()
    session = client._connection.aio.session
    assert session.requests.held() == [], reached
    until = time.monotonic() + WAIT_S
    while list(session.watches.all()) and time.monotonic() < until:
        client.ping()
    assert list(session.watches.all()) == [], reached


# -- real signals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body_s", [0.0, 0.0005])
def test_alarms_at_random_times(genie, other, body_s):
    """Most alarms strike where no line of the client runs: in the wait for the server, and at the entry of a function."""
    chance = random.Random(7)  # noqa: S311

    def on_alarm(*_: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, on_alarm)
    interruptions = 0
    try:
        with sync.connect(*genie.address) as client:
            for number in range(400):
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00001, 0.0012 + 2 * body_s))
                        with client.lock(f"{NAME}/{number}", watchdog=True, transaction_timeout=600):
                            time.sleep(body_s)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Interruption:
                    interruptions += 1
            for number in range(400):
                other.acquire(f"{NAME}/{number}", queue_timeout=WAIT_S).release()
            client.ping()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interruptions > 50
