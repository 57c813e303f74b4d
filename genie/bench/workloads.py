"""What is asked for: the lines of every slot, made before the run so that asking costs nothing but a choice.

A slot is the place of one request in flight. It asks with one of its lines, chosen at random each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from genie.protocol import messages
from genie.protocol.resources import EXCLUSIVE, SHARED

Lines = tuple[bytes, ...]
"""What a slot may ask for, each as likely as the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What can be set of the workloads."""

    keys: int = 8
    """Keys that all slots of `mixed` share."""
    shared_percent: int = 80
    """How many of the requests of `mixed` are shared; the others are exclusive."""
    resources: int = 3
    """Resources that a request of `several` names."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`slots(prefix, shape, count)`: the lines of so many slots, on keys that begin with the prefix."""

    title: Callable[[Shape], str]
    slots: Callable[[str, Shape, int], list[Lines]]


def _own(prefix: str, _: Shape, count: int) -> list[Lines]:
    return [(_request(f"{EXCLUSIVE}{prefix}{slot}"),) for slot in range(count)]


def _hot(prefix: str, _: Shape, count: int) -> list[Lines]:
    return [(_request(f"{EXCLUSIVE}{prefix}hot"),)] * count


def _mixed(prefix: str, shape: Shape, count: int) -> list[Lines]:
    modes = [SHARED] * shape.shared_percent + [EXCLUSIVE] * (100 - shape.shared_percent)
    every = {(mode, key): _request(f"{mode}{prefix}{key}") for mode in set(modes) for key in range(shape.keys)}
    return [tuple(every[mode, key] for mode in modes for key in range(shape.keys))] * count


def _several(prefix: str, shape: Shape, count: int) -> list[Lines]:
    parts = range(shape.resources)
    return [(_request(*(f"{EXCLUSIVE}{prefix}{slot}/{part}" for part in parts)),) for slot in range(count)]


def _title_of_mixed(shape: Shape) -> str:
    keys = "the same key" if shape.keys == 1 else f"one of {shape.keys} keys"
    return f"requests lock {keys}, {shape.shared_percent} % of them shared"


def _title_of_several(shape: Shape) -> str:
    keys = "1 key" if shape.resources == 1 else f"{shape.resources} keys"
    return f"each request locks {keys} of its own"


def _request(*resources: str) -> bytes:
    # What a killed benchmark holds goes with its connections.
    return messages.command("request", resources=resources, onDisconnect="release")


WORKLOADS: Final[Mapping[str, Workload]] = {
    "own": Workload(lambda _: "each request locks a key of its own", _own),
    "hot": Workload(lambda _: "all requests lock the same key", _hot),
    "mixed": Workload(_title_of_mixed, _mixed),
    "several": Workload(_title_of_several, _several),
}
"""By their names on the command line."""
