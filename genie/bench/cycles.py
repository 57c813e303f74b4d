"""One connection's part of the load, without a socket: bytes come in, the bytes to be sent go out.

A cycle is `request`, `queued`, `locked`, `release`, `released`. Each slot begins the next when one has ended. Requests
carry no `ref`: the server answers in order, so a `queued` belongs to the oldest request that has none, and so does an
`error` without an id.

A slot whose cycle went wrong rests until the next `tick`, so that a server that refuses everything is not asked
without a pause.
"""

from __future__ import annotations

from collections import Counter, deque
from random import random

from genie.bench.histogram import Histogram
from genie.bench.workloads import Lines
from genie.errors import Code
from genie.protocol import framing, messages

SUCCESS = "success"
BY_SOMEBODY_ELSE = "released-by-somebody-else"
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


class Cycles:
    """The slots of one connection, one for each of `lines`. Times are nanoseconds of a clock that never goes back."""

    def __init__(self, lines: list[Lines], tally: Tally) -> None:
        self._tally = tally
        self._framing = framing.Lines()
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
            self._tally.errors[BY_SOMEBODY_ELSE if told.reason == SUCCESS else told.reason] += 1
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
