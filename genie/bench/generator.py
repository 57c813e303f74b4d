"""The workloads of `genie bench`, and the client side of one connection, without a socket.

A connection has one slot for each request that it may have in flight. A slot repeats a cycle: request, grant, release.
The request commands of a slot are encoded before the run. Each cycle sends one of these commands, chosen at random.
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

RequestLines = tuple[bytes, ...]
"""The encoded request commands of one slot. Each cycle sends one of them, chosen at random with equal probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadParameters:
    """The configurable parameters of the workloads."""

    keys: int = 8
    """Number of keys of `mixed`, shared by all slots."""
    shared_percent: int = 80
    """Percentage of shared requests in `mixed`. All other requests are exclusive."""
    resources: int = 3
    """Number of resources in each request of `several`."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The resources that the requests of a benchmark lock."""

    title: Callable[[WorkloadParameters], str]
    """Returns the description of the workload in the output."""
    encode_slots: Callable[[str, WorkloadParameters, int], list[RequestLines]]
    """`encode_slots(prefix, parameters, count)` returns the request lines of `count` slots.

    The names of all resources start with `prefix`.
    """


def _encode_own(prefix: str, _: WorkloadParameters, count: int) -> list[RequestLines]:
    """Return the request line of each slot: an exclusive lock on a resource of its own."""
    return [(_encode_request(f"{EXCLUSIVE}{prefix}{slot}"),) for slot in range(count)]


def _encode_hot(prefix: str, _: WorkloadParameters, count: int) -> list[RequestLines]:
    """Return the same request line for all slots: an exclusive lock on one resource."""
    return [(_encode_request(f"{EXCLUSIVE}{prefix}hot"),)] * count


def _encode_mixed(prefix: str, parameters: WorkloadParameters, count: int) -> list[RequestLines]:
    """Return the same request lines for all slots: 100 for each key, of which `shared_percent` request a shared lock.

    Each cycle sends one of the lines, all with equal probability. So `shared_percent` of all requests are shared.
    """
    modes = [SHARED] * parameters.shared_percent + [EXCLUSIVE] * (100 - parameters.shared_percent)
    keys = range(parameters.keys)
    encoded = {(mode, key): _encode_request(f"{mode}{prefix}{key}") for mode in set(modes) for key in keys}
    return [tuple(encoded[mode, key] for mode in modes for key in keys)] * count


def _encode_several(prefix: str, parameters: WorkloadParameters, count: int) -> list[RequestLines]:
    """Return the request line of each slot: exclusive locks on several resources of its own."""

    def encode_slot(slot: int) -> bytes:
        return _encode_request(*(f"{EXCLUSIVE}{prefix}{slot}/{index}" for index in range(parameters.resources)))

    return [(encode_slot(slot),) for slot in range(count)]


def _title_of_mixed(parameters: WorkloadParameters) -> str:
    keys = "the same key" if parameters.keys == 1 else f"one of {parameters.keys} keys"
    return f"requests lock {keys}, {parameters.shared_percent} % of them shared"


def _title_of_several(parameters: WorkloadParameters) -> str:
    keys = "1 key" if parameters.resources == 1 else f"{parameters.resources} keys"
    return f"each request locks {keys} of its own"


def _encode_request(*resources: str) -> bytes:
    # With `onDisconnect`, the server releases the locks of a killed benchmark when its connections end.
    return messages.command("request", resources=resources, onDisconnect="release")


WORKLOADS: Final[Mapping[str, Workload]] = {
    "own": Workload(lambda _: "each request locks a key of its own", _encode_own),
    "hot": Workload(lambda _: "all requests lock the same key", _encode_hot),
    "mixed": Workload(_title_of_mixed, _encode_mixed),
    "several": Workload(_title_of_several, _encode_several),
}
"""Workloads by their names on the command line."""


# -- One connection, without a socket: methods accept received bytes and return the bytes to send --------

SUCCESS = "success"
RELEASED_BY_OTHER = "released-by-other"
PROTOCOL_ERROR = "protocol-error"

_RELEASE_HEAD, _RELEASE_TAIL = messages.command("release", id=0).split(b"0")


class Tally:
    """The measurements of all connections together."""

    def __init__(self) -> None:
        self.measuring = False
        """True while durations are recorded. Errors are always counted."""
        self.to_locked = Histogram()
        """Durations from sending a request to reading `locked`, of completed cycles."""
        self.to_released = Histogram()
        """Durations from sending a request to reading `released`, of completed cycles."""
        self.errors: Counter[str] = Counter()
        """Number of errors by name: the `code` of an error message, the `reason` of an unexpected end, or a name that
        this package defines, such as `PROTOCOL_ERROR`."""


class _Slot:
    """A sequence of cycles on a connection, at most one at a time. Times are nanoseconds of a monotonic clock."""

    __slots__ = ("lines", "locked_at_ns", "releasing", "requested_at_ns")

    def __init__(self, lines: RequestLines) -> None:
        self.lines = lines
        self.requested_at_ns = 0
        self.locked_at_ns = 0
        """0 until the request is granted."""
        self.releasing = False
        """True after the release was sent."""


class LoadConnection:
    """The protocol state of one connection, with one slot for each item of `slots`.

    Methods return the bytes to send. Times are nanoseconds of a monotonic clock.
    """

    def __init__(self, slots: list[RequestLines], tally: Tally) -> None:
        self._tally = tally
        self._framing = framing.LineReader()
        self._idle_slots = [_Slot(lines) for lines in slots]
        """Slots without a request. The next `tick` starts a cycle of each."""
        self._unacknowledged_slots: deque[_Slot] = deque()
        """Slots whose request was sent but has no id yet, in the order in which the server will reply."""
        self._slot_by_request_id: dict[int, _Slot] = {}
        """Slots by the id of their request, which waits, is held, or is being released."""
        self._rejected_release_ids: list[int] = []
        """Ids of requests whose release the server rejected. The next `tick` sends their releases again."""
        self.stopping = False
        """True after `stop` was called: no further cycles are started."""
        self.protocol_error = ""
        """Description of an invalid message, after which the connection is unusable. Empty if there was none."""
        self.rejection = ""
        """The last error before the server accepted the first request, for example a missing token. Empty after
        that."""
        self._has_accepted_request = False

    @property
    def unfinished_count(self) -> int:
        """Number of requests whose end the server has not confirmed."""
        return len(self._unacknowledged_slots) + len(self._slot_by_request_id)

    def tick(self, now_ns: int) -> bytes:
        """Return the commands to send: again the releases that the server rejected, and a request for each idle slot."""
        commands = [_release(id_) for id_ in self._rejected_release_ids if id_ in self._slot_by_request_id]
        self._rejected_release_ids.clear()
        if not self.stopping:
            commands += [self._request(slot, now_ns) for slot in self._idle_slots]
            self._idle_slots.clear()
        return b"".join(commands)

    def stop(self) -> bytes:
        """Stop starting cycles, and return the release commands of all waiting and held requests.

        `unfinished_count` falls to 0 as the replies arrive.
        """
        self.stopping = True
        return b"".join(
            [self._start_release(id_, slot) for id_, slot in self._slot_by_request_id.items() if not slot.releasing]
        )

    def receive(self, data: bytes, now_ns: int) -> bytes:
        """Process received bytes and return the bytes to send. Sets `protocol_error` if the received bytes are invalid."""
        commands: list[bytes] = []
        try:
            for line in self._framing.feed(data):
                self._on_message(messages.read(line), now_ns, commands)
        except (ValueError, framing.LineTooLong) as error:
            self._tally.errors[PROTOCOL_ERROR] += 1
            self.protocol_error = f"received an invalid message: {error}"
        return b"".join(commands)

    def _on_message(self, message: messages.Message | None, now_ns: int, commands: list[bytes]) -> None:
        """Handle a message from the server, and append the commands to send to `commands`.

        Only messages about requests matter to the benchmark. Other messages are ignored.
        """
        match message:
            case messages.Queued():
                if not self._unacknowledged_slots:
                    raise ValueError("a reply to a request that was not sent")
                self._has_accepted_request = True
                self.rejection = ""
                id_ = message.payload.id  # that of the oldest unacknowledged request: the server replies in order
                slot = self._slot_by_request_id[id_] = self._unacknowledged_slots.popleft()
                if self.stopping:
                    commands.append(self._start_release(id_, slot))
            case messages.Locked():
                locked = self._slot_by_request_id.get(message.payload.id)
                if locked is not None and not locked.releasing:
                    locked.locked_at_ns = now_ns
                    commands.append(self._start_release(message.payload.id, locked))
            case messages.Released():
                self._on_released(message.payload, now_ns, commands)
            case messages.Error():
                self._on_error(message.payload)

    def _on_released(self, released: messages.Released.Payload, now_ns: int, commands: list[bytes]) -> None:
        """Complete a cycle of a slot and start the next cycle.

        If the request ended without a release by this connection, for example by a timeout, count an error and make the
        slot idle. After `stop` no cycle is started.
        """
        slot = self._slot_by_request_id.pop(released.id, None)
        if slot is None:  # the reply to a release that was sent when the request had already ended
            return
        if released.reason != SUCCESS or not slot.releasing:
            error = RELEASED_BY_OTHER if released.reason == SUCCESS else released.reason
            self._tally.errors[error] += 1
            self._idle_slots.append(slot)
            return
        if self._tally.measuring and slot.locked_at_ns:
            self._tally.to_locked.add(slot.locked_at_ns - slot.requested_at_ns)
            self._tally.to_released.add(now_ns - slot.requested_at_ns)
        if self.stopping:
            self._idle_slots.append(slot)
        else:
            commands.append(self._request(slot, now_ns))

    def _on_error(self, error: messages.Error.Payload) -> None:
        """Count an error. The slot of a rejected request becomes idle, and the next `tick` repeats a rejected release.

        An error with an id rejects a release. An error without an id rejects the oldest unacknowledged request.
        """
        self._tally.errors[error.code] += 1
        if not self._has_accepted_request:
            self.rejection = f"{error.code}: {error.message}"
        if error.id is not None:
            if error.code != Code.UNKNOWN_ID:
                self._rejected_release_ids.append(error.id)
            elif error.id in self._slot_by_request_id:  # the request has already ended, so there is nothing to release
                self._idle_slots.append(self._slot_by_request_id.pop(error.id))
        elif self._unacknowledged_slots:
            self._idle_slots.append(self._unacknowledged_slots.popleft())

    def _request(self, slot: _Slot, now_ns: int) -> bytes:
        """Start a cycle of a slot, and return a request command chosen at random from the slot's lines."""
        slot.requested_at_ns, slot.locked_at_ns, slot.releasing = now_ns, 0, False
        self._unacknowledged_slots.append(slot)
        lines = slot.lines
        return lines[0] if len(lines) == 1 else lines[int(random() * len(lines))]  # noqa: S311 - not for security

    def _start_release(self, id_: int, slot: _Slot) -> bytes:
        """Mark the request of a slot as being released, and return the release command."""
        slot.releasing = True
        return _release(id_)


def _release(id_: int) -> bytes:
    return b"%b%d%b" % (_RELEASE_HEAD, id_, _RELEASE_TAIL)
