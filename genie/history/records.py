"""The format of the history: one JSON line for each event, with the key `event`. No other module depends on the format.

All times are milliseconds since the Unix epoch. A field with its default value is left out. A line with an unknown
field or event is rejected: a later version of Genie has written it.

The server writes nearly all requests and releases as it received them, which takes only the time of a copy. A file with
such commands is *raw*: its lines without `event` are commands. *Marks*, lines before the commands, contain what the
commands do not contain, such as the time. `RawDecoder` turns commands and marks into events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, ValidationError, json

from genie.core import Reason, Release, Request
from genie.errors import Code, RequestRejected
from genie.lock_modes import S, U, UnitCount, X, lock_text
from genie.protocol import commands

FORMAT: Final = 1
"""The version of the format, which the first line of each file contains."""
TIMEOUT_MS: Final = 10_000.0
"""The default queue timeout and the default transaction timeout, which lines omit."""


class _Event(Struct, tag_field="event", omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """An event or a mark with a time."""

    at: float
    """The time in Unix ms."""


class Opened(_Event, tag="opened"):
    """The first line of a file."""

    format: int
    namespace: str
    server: str
    term: str
    """Identifies the leadership. It is the same in all files of one leadership."""
    number: int
    """Counts the files of a leadership from 1."""


class Queued(_Event, tag="queued"):
    """A request arrived and waits.

    If the line has no names, the request has `anyOf`, and ends at once because too little was available.
    """

    id: int
    exclusive: tuple[str, ...] = ()
    """The names that are locked in exclusive mode."""
    shared: tuple[str, ...] = ()
    """The names that are locked in shared mode."""
    transaction: str | None = None
    priority: float = 0
    queue_timeout_ms: float = TIMEOUT_MS
    transaction_timeout_ms: float = TIMEOUT_MS
    release_on_disconnect: bool = False
    principal: str | None = None
    note: str | None = None
    units: dict[str, UnitCount] | None = None
    """The units of counted resources, and their limits, by name. None instead of an empty dict."""
    waits_for: tuple[int, ...] = ()
    """The ids of the first requests for which this request waits, holders first."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the request, each once."""
        return (*self.exclusive, *self.shared, *(self.units or ()))

    @property
    def locks(self) -> list[str]:
        """The locks of the request as clients write them."""
        return lock_texts(self.exclusive, self.shared, self.units)


class Granted(Queued, tag="granted"):
    """A request arrived and was granted at once. A request with `anyOf` has the names that it was granted."""

    fence: int = 0


class Carried(Granted, tag="carried"):
    """A request that was live when the file began.

    `at` is the time of its grant. If the request waits, its `fence` is 0, and `at` is the time at which it began to
    wait.
    """

    deadline: float | None = None
    """When the request ends at the latest. None if it has no time limit."""
    positions: dict[str, tuple[float, int]] | None = None
    """By name, the positions of the request in rearranged wait queues: negated priority and ticket."""


class Context(_Event, tag="context"):
    """A mark: the commands in the next lines were executed at this time, for `principal`, in a session without a note.

    Each further request has the next id, and each further grant the next fencing token.
    """

    next_id: int
    """The id of the first request in the next lines."""
    next_fence: int
    """The fencing token of the first grant in the next lines."""
    principal: str | None = None


class Time(_Event, tag="time"):
    """A mark: the commands in the next lines were executed at this time."""


class Session(Struct, tag_field="event", tag="session", forbid_unknown_fields=True, gc=False):
    """A mark: requests without a note in the next lines have this note of their session."""

    note: str | None = None


class Waits(Struct, tag_field="event", tag="waits", forbid_unknown_fields=True, gc=False):
    """A mark: the command in the next line is a request that waits for these ids."""

    ids: tuple[int, ...]


class Locked(_Event, tag="locked"):
    """A waiting request was granted."""

    id: int
    fence: int


class Released(_Event, tag="released"):
    """A held or waiting request ended."""

    id: int
    reason: Reason = Reason.SUCCESS
    cycle: tuple[str | int, ...] = ()
    """The owners of the deadlock that ended the request: transactions, or the ids of requests without one."""


class Extended(_Event, tag="extended"):
    """A held lock got a new deadline, `transaction_timeout_ms` from now."""

    id: int
    transaction_timeout_ms: float


class Moved(_Event, tag="moved"):
    """A waiting request was moved in wait queues."""

    id: int
    positions: dict[str, tuple[float, int]] | None = None
    """The new positions, as in `Carried`. None if the request is back at the positions of its priority and its arrival."""


class Gap(_Event, tag="gap"):
    """Something is missing, because the disk or the archiver was too slow, or the history was full.

    If `live` is 0, the events from `at` to `until` are missing. Otherwise the requests that are carried into the file
    are missing, and no events.
    """

    dropped: int
    """The number of dropped writes. A write contains many events."""
    until: float
    live: int = 0
    """The number of the missing requests. -1 if the number is unknown."""


WHY_MISSING: Final = "because the disk or the archiver was too slow, or the history was full"
"""Why events may be missing, in messages."""

Line = Opened | Carried | Granted | Queued | Locked | Released | Extended | Moved | Gap

encode = json.Encoder().encode
encode_lines = json.Encoder().encode_lines
_decode_raw = json.Decoder(Line | Context | Time | Session | Waits).decode
_decode_lines = json.Decoder(Line).decode_lines
CONTEXT: Final = b'{"event":"context"'
"""The beginning of the line of a `Context`."""
TIME: Final = b'{"event":"time","at":%r}'
"""The line of a `Time`, to be formatted with its time."""
WAITS: Final = b'{"event":"waits","ids":%r}'
"""The line of a `Waits`, to be formatted with a list of ids."""
LOCKED: Final = b'{"event":"locked","at":%r,"id":%d,"fence":%d}'
"""The line of a `Locked`, to be formatted with its fields. This takes half the time of encoding a `Locked`."""
RELEASE: Final = b'{"command":"release","payload":{"id":%d}}'
"""The line of a release, to be formatted with the id. For a release that was not received as a line with an id."""
MAX_UNCHECKED_BYTES: Final = 512
"""A command of at most this size is recorded as it was received. A longer one may contain superfluous text such as
spaces."""
_GAP: Final = b'{"event":"gap"'
"""The beginning of the line of a `Gap`."""
_EVENT: Final = b'{"event":'
"""The beginning of all events and marks. No command of a client begins like this, because a command has no field
`event`."""


def lock_texts(exclusive: tuple[str, ...], shared: tuple[str, ...], units: Mapping[str, UnitCount] | None) -> list[str]:
    """Return locks as clients write them, such as `exclusive:NAME` and `2/10:NAME`."""
    return [
        *(lock_text(name, X) for name in exclusive),
        *(lock_text(name, S) for name in shared),
        *(lock_text(name, U, each) for name, each in (units or {}).items()),
    ]


class UnreadableHistory(ValueError):
    """A file of the history is damaged, or was written by a version of Genie with another format."""


class OtherFormat(UnreadableHistory):
    """Another version of Genie has written a file of the history."""


def is_event(line: Line) -> bool:
    """Return whether a line is an event or a gap: neither the header of a file, nor a request that is carried into the file."""
    return not isinstance(line, (Opened, Carried))


def decode(text: bytes) -> list[Line]:
    """Decode lines of an archived file.

    Raises UnreadableHistory for a damaged line, and OtherFormat for a format that this version of Genie does not know.
    """
    try:
        lines: list[Line] = _decode_lines(text)
    except ValueError as error:
        raise _to_unreadable(error) from None
    return lines


def _to_unreadable(error: ValueError) -> UnreadableHistory:
    """Return the error to raise for lines that msgspec rejects: because they are no JSON, or have unknown fields or types."""
    return _to_other_format(error) if isinstance(error, ValidationError) else UnreadableHistory(f"damaged: {error}")


def _to_other_format(error: Exception) -> OtherFormat:
    """Return the error to raise for lines that are valid JSON, but not of this format."""
    return OtherFormat(f"another version of Genie has written this history: {error}")


def unrecorded(at: float, live: int) -> Gap:
    """Return the gap that replaces the requests that are carried into a file.

    `live` is their number, or -1 if it is unknown.
    """
    return Gap(at, dropped=0, until=at, live=live)


def begins_unrecorded(text: bytes) -> bool:
    """Return whether a gap replaces the requests that are carried into the file that begins with `text`.

    The gap is the first line, or the second after `opened`.
    """
    first_lines = text.split(b"\n", 2)[:2]
    return any(line.startswith(_GAP) and b'"live":' in line for line in first_lines)


def command_line(command: Request | Release) -> bytes:
    """Return the line of a command that was not received as one line, so that `RawDecoder` can read the command."""
    if isinstance(command, Release):
        return RELEASE % command.id
    payload = {
        "resources": lock_texts(command.exclusive, command.shared, command.units),
        "queueTimeout": command.queue_timeout_ms,
        "transactionTimeout": command.transaction_timeout_ms,
        "transactionName": command.transaction,
        "priority": command.priority,
        "onDisconnect": "release" if command.release_on_disconnect else "keep",
        "note": command.context.note,
    }
    return encode(
        {"command": "request", "payload": {key: value for key, value in payload.items() if value is not None}}
    )


def without_padding(line: bytes) -> bytes:
    """Return a line of the same meaning, without superfluous text such as spaces if it is a long command."""
    if len(line) <= MAX_UNCHECKED_BYTES or line.startswith(_EVENT):
        return line
    command = commands.read(line)
    if isinstance(command, commands.LargeRequest):
        command = command.request
    if not isinstance(command, (Request, Release)):
        return line
    return min(line, command_line(command), key=len)


class RawDecoder:
    """Decodes the lines of one raw file, in order."""

    def __init__(self) -> None:
        self._at = 0.0
        """The time of the next command. 0 if no mark with a time precedes it."""
        self._principal: str | None = None
        """The principal of the next command."""
        self._note: str | None = None
        """The note of the session of the next command."""
        self._waits_for: tuple[int, ...] | None = None
        """The ids of the requests for which the next command waits. None if it does not wait."""
        self._next_id = self._next_fence = 0
        """The id of the next command that is a request, and the fencing token of the next grant."""

    def decode(self, text: bytes) -> list[Line]:
        """Decode the next lines. Raises UnreadableHistory and OtherFormat like `records.decode`."""
        lines: list[Line] = []
        try:
            for encoded in text.split(b"\n"):
                if encoded.startswith(_EVENT):
                    line = _decode_raw(encoded)
                    if not self._update_context(line):
                        lines.append(line)
                elif encoded:  # empty after the last newline
                    lines.append(self._to_event(commands.read(encoded)))
        except RequestRejected as rejection:
            if rejection.code == Code.BAD_JSON:
                raise UnreadableHistory(f"damaged: {rejection}") from None
            raise _to_other_format(rejection) from None
        except UnreadableHistory:
            raise
        except ValueError as error:
            raise _to_unreadable(error) from None
        return lines

    def _update_context(self, line: Line | Context | Time | Session | Waits) -> bool:
        """Update the context of the next command by a mark or an event. Return whether the line is a mark."""
        match line:
            case Time():
                self._at = line.at
            case Waits():
                self._waits_for = line.ids
            case Session():
                self._note = line.note
            case Context():
                self._at, self._principal, self._note = line.at, line.principal, None
                self._next_id, self._next_fence = line.next_id, line.next_fence
            case _:
                self._count_event(line)
                return False
        return True

    def _count_event(self, line: Line) -> None:
        """Advance the next id after a request, and the next fencing token after a grant."""
        if isinstance(line, Carried):  # from an earlier file
            return
        if isinstance(line, Queued):  # also Granted
            self._next_id = line.id + 1
        if isinstance(line, (Granted, Locked)):
            self._next_fence = line.fence + 1

    def _to_event(self, command: commands.WireCommand) -> Line:
        """Return the event that a command has caused.

        Advances the next id, and the next fencing token after a grant.
        """
        command = commands.without_namespace(command)
        if not self._at:
            raise UnreadableHistory("damaged: the time of a command is missing")
        if type(command) is Release:
            return Released(self._at, command.id)
        if not isinstance(command, Request):
            raise OtherFormat("another version of Genie has written this history: it records other commands as lines")
        queue_ms, transaction_ms, waits_for = command.queue_timeout_ms, command.transaction_timeout_ms, self._waits_for
        fields = (
            self._at,
            self._next_id,
            command.exclusive,
            command.shared,
            command.transaction,
            command.priority,
            # msgspec leaves a field out whose value is the same object as the default.
            TIMEOUT_MS if queue_ms == TIMEOUT_MS else queue_ms,
            TIMEOUT_MS if transaction_ms == TIMEOUT_MS else transaction_ms,
            command.release_on_disconnect,
            self._principal,
            self._note if command.context.note is None else command.context.note,
            command.units or None,
        )
        self._next_id += 1
        if waits_for is not None:
            self._waits_for = None
            return Queued(*fields, waits_for)
        self._next_fence += 1
        return Granted(*fields, fence=self._next_fence - 1)
