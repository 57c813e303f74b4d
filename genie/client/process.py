"""The functions with which clients use their process. A simulation replaces them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genie.client.note import default_note


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop: of uvloop if uvloop is installed, else of asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@dataclass(frozen=True, slots=True)
class Process:
    """The functions with which clients use their process."""

    default_note: Callable[[], str] = default_note
    """Returns the note of clients without a note of their own."""
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    """Creates the event loop in the background thread of a client of `genie.sync`."""


_current = Process()


def current_process() -> Process:
    """Return the process functions that new clients use."""
    return _current


@contextmanager
def use_process(process: Process) -> Iterator[None]:
    """Replace the process functions of the clients that are made within this context, in all threads."""
    global _current  # noqa: PLW0603 - not a context variable, because that is for one thread
    previous, _current = _current, process
    try:
        yield
    finally:
        _current = previous
