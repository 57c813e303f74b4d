"""Forks of the process: a selector that was started before belongs to the parent process.

Its copy in the child would select the tokens that the parent holds, and would wait forever for an
event loop whose thread exists in the parent only.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

STARTED_BEFORE_FORK = "it was started before this process was forked, and belongs to the parent process"
"""Why a selector cannot be used in a child process, for error messages."""


class Forkable(Protocol):
    """An object that adapts its copy in a forked process."""

    def after_fork(self) -> None:
        """Called in the child process, in the thread that has forked."""


_objects: WeakSet[Forkable] = WeakSet()


def adapt_after_fork(object: Forkable) -> None:
    """Call `after_fork` of an object in each forked process, as long as the object exists."""
    _objects.add(object)


def _after_fork_in_child() -> None:
    for object in list(_objects):
        object.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
