"""Counts executed bytecode instructions and allocated memory: the same on every machine and in every run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def _nothing(_: str) -> bool:
    return False


class OpcodeCounter:
    """Counts the instructions of all functions that are called between `start` and `stop`.

    What runs in C is one instruction: a bisection, an insertion into a list, the growth of a dict. `excludes` says whether
    the functions of a file are left out.
    """

    def __init__(self, excludes: Callable[[str], bool] = _nothing) -> None:
        self.count = 0
        self._excludes = excludes
        self._excluded: dict[str, bool] = {__file__: True}
        """The results of `excludes` by file name."""
        self._previous: Any = None

    def start(self) -> None:
        """Start counting."""
        self._previous = sys.gettrace()
        sys.settrace(self._trace_call)

    def stop(self) -> None:
        """Stop counting."""
        sys.settrace(self._previous)

    def _trace_call(self, frame: FrameType, *_: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._excluded:
            self._excluded[name] = self._excludes(name)
        if self._excluded[name]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, _: FrameType, event: str, __: Any) -> Any:
        self.count += event == "opcode"
        return self._trace


class AllocationCounter(OpcodeCounter):
    """Counts the allocated blocks of Python's small-object allocator, by comparing their number after each instruction.

    A block that is allocated and freed within one instruction is not counted, nor is an object that CPython takes from one
    of its free lists.
    """

    def __init__(self, excludes: Callable[[str], bool] = _nothing) -> None:
        super().__init__(excludes)
        self._blocks = sys.maxsize
        """Allocated blocks after the last instruction."""

    def _trace_call(self, frame: FrameType, *_: Any) -> Any:
        trace = super()._trace_call(frame)
        self._blocks = sys.getallocatedblocks()
        return trace

    def _trace(self, *_: Any) -> Any:
        blocks = sys.getallocatedblocks()
        if blocks > self._blocks:
            self.count += blocks - self._blocks
        self._blocks = blocks
        return self._trace
