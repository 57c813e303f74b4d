"""Waiting threads of the client for threads."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from genie.client import handover as handover_module
from genie.client.handover import Handover, LostEvent

LIMIT_S = 10.0


class InterruptedBySignal(Exception):
    pass


@pytest.fixture(autouse=True)
def raising_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def handle(_number: int, _frame: object) -> None:
        raise InterruptedBySignal

    monkeypatch.setattr(handover_module, "SIGNAL_CHECK_S", 0.01)
    former = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, former)


def interrupted(wait: Callable[[], object], complete: Callable[[], None]) -> bool:
    """Return whether a signal ends a wait. The wait is completed after `LIMIT_S`."""
    ended, main = threading.Event(), threading.main_thread().ident or 0

    def miss_signal() -> None:
        while sys._current_frames()[main].f_code.co_name != "acquire_interruptibly":
            time.sleep(0)
        _thread.interrupt_main(
            signal.SIGUSR1
        )  # like a signal that arrives just before the wait: it does not end the wait
        if not ended.wait(LIMIT_S):
            complete()

    thread = threading.Thread(target=miss_signal)
    thread.start()
    try:
        wait()
    except InterruptedBySignal:
        return not ended.is_set() and thread.is_alive()
    finally:
        ended.set()
        thread.join()
    return False


def test_a_signal_that_arrives_just_before_a_call_waits_ends_the_wait() -> None:
    for _ in range(20):
        handover = Handover[None]()
        assert interrupted(handover.wait, lambda handover=handover: handover.set_result(None))  # type: ignore[misc]


def test_a_signal_that_arrives_just_before_a_wait_for_a_lost_lock_ends_the_wait() -> None:
    for _ in range(20):
        event = LostEvent()
        assert interrupted(event.wait, event.set)
