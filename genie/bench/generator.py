"""What is asked for: the lines of every slot, made before the run so that asking costs nothing but a choice.

A slot is the place of one request in flight. It asks with one of its lines, chosen at random each time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import random
from typing import Final

from genie.bench.histogram import Histogram
from genie.errors import Code
from genie.protocol import framing, messages
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


# -- One connection's part of the load, without a socket: bytes come in, the bytes to be sent go out --------

SUCCESS = "success"
RELEASED_BY_OTHER = "released-by-other"
NO_MESSAGE = "no-message"

_BEFORE_ID, _BEHIND_ID = messages.command("release", id=0).split(b"0")


class Tally:
    """What all connections measured together.

    Durations are counted while `measuring`, of cycles that end then. Errors are counted always: by the `code` of an
    error, the `reason` of an end that was not asked for, or a name of ours.
    """

    def __init__(self) -> None:
        self.measuring = False
        self.to_locked = Histogram()
        self.to_released = Histogram()
        self.errors: Counter[str] = Counter()


class _Slot:
    __slots__ = ("asked_ns", "leaving", "lines", "locked_ns")

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.asked_ns = 0
        self.locked_ns = 0
        """0: not yet."""
        self.leaving = False
        """Its release is sent."""


class LoadConnection:
    """The slots of one connection, one for each of `lines`. Times are nanoseconds of a clock that never goes back."""

    def __init__(self, lines: list[Lines], tally: Tally) -> None:
        self._tally = tally
        self._framing = framing.LineReader()
        self._resting = [_Slot(of_slot) for of_slot in lines]
        self._asked: deque[_Slot] = deque()
        """Without an id."""
        self._known: dict[int, _Slot] = {}
        """Waiting, held, or being released, by id."""
        self._again: list[int] = []
        """Ids whose release was refused."""
        self.stopping = False
        self.broken = ""
        """Why nothing more that comes can be understood."""
        self.refused = ""
        """What the server said instead of taking anything from this connection."""
        self._taken = False
        """The server has taken a request."""

    @property
    def owed(self) -> int:
        """Requests that have not ended, as far as was heard."""
        return len(self._asked) + len(self._known)

    def tick(self, now_ns: int) -> bytes:
        """Ask for those who rest, and repeat what was refused."""
        out = [_release(id_) for id_ in self._again if id_ in self._known]
        self._again.clear()
        if not self.stopping:
            out += [self._ask(slot, now_ns) for slot in self._resting]
            self._resting.clear()
        return b"".join(out)

    def stop(self) -> bytes:
        """Begin nothing more, cancel what waits; `owed` goes down to nothing as the answers come."""
        self.stopping = True
        return b"".join([self._leave(id_, slot) for id_, slot in self._known.items() if not slot.leaving])

    def receive(self, data: bytes, now_ns: int) -> bytes:
        """Take what has come; returns what is to be sent. Afterwards look whether it is `broken`."""
        out: list[bytes] = []
        try:
            for line in self._framing.feed(data):
                self._take(messages.read(line), now_ns, out)
        except (ValueError, framing.LineTooLong) as error:
            self._tally.errors[NO_MESSAGE] += 1
            self.broken = f"it sent what is no message of a Genie server: {error}"
        return b"".join(out)

    def _take(self, message: messages.Message | None, now_ns: int, out: list[bytes]) -> None:
        match message:
            case messages.Queued():
                self._queued(message.payload.id, out)
            case messages.Locked():
                self._locked(message.payload.id, now_ns, out)
            case messages.Released():
                self._released(message.payload, now_ns, out)
            case messages.Error():
                self._refused(message.payload)

    def _queued(self, id_: int, out: list[bytes]) -> None:
        if not self._asked:
            raise ValueError("an answer to a request that was not sent")
        self._taken, self.refused = True, ""
        slot = self._known[id_] = self._asked.popleft()
        if self.stopping:
            out.append(self._leave(id_, slot))

    def _locked(self, id_: int, now_ns: int, out: list[bytes]) -> None:
        slot = self._known.get(id_)
        if slot is not None and not slot.leaving:
            slot.locked_ns = now_ns
            out.append(self._leave(id_, slot))

    def _released(self, told: messages.Released.Payload, now_ns: int, out: list[bytes]) -> None:
        slot = self._known.pop(told.id, None)
        if slot is None:  # it ended by itself, and this answers the release that came too late
            return
        if told.reason != SUCCESS or not slot.leaving:
            self._tally.errors[RELEASED_BY_OTHER if told.reason == SUCCESS else told.reason] += 1
            self._resting.append(slot)
            return
        if self._tally.measuring and slot.locked_ns:
            self._tally.to_locked.add(slot.locked_ns - slot.asked_ns)
            self._tally.to_released.add(now_ns - slot.asked_ns)
        if self.stopping:
            self._resting.append(slot)
        else:
            out.append(self._ask(slot, now_ns))

    def _refused(self, told: messages.Error.Payload) -> None:
        self._tally.errors[told.code] += 1
        if not self._taken:
            self.refused = f"{told.code}: {told.message}"
        if told.id is not None:
            if told.code != Code.UNKNOWN_ID:
                self._again.append(told.id)
            elif told.id in self._known:
                self._resting.append(self._known.pop(told.id))
        elif self._asked:
            self._resting.append(self._asked.popleft())

    def _ask(self, slot: _Slot, now_ns: int) -> bytes:
        slot.asked_ns, slot.locked_ns, slot.leaving = now_ns, 0, False
        self._asked.append(slot)
        lines = slot.lines
        return lines[0] if len(lines) == 1 else lines[int(random() * len(lines))]  # noqa: S311 - no secret

    def _leave(self, id_: int, slot: _Slot) -> bytes:
        slot.leaving = True
        return _release(id_)


def _release(id_: int) -> bytes:
    return b"%b%d%b" % (_BEFORE_ID, id_, _BEHIND_ID)
