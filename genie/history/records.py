"""The format of the history: one JSON line for each event, with the key `event`. No other module depends on the format.

All times are milliseconds since the Unix epoch. A field with its default value is left out. A line with an unknown field or
event is rejected: a later version of Genie has written it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, ValidationError, json

from genie.core import Reason

FORMAT: Final = 1
"""The version of the format, which the first line of each file has."""
TIMEOUT_MS: Final = 10_000.0
"""The queue timeout and the transaction timeout of a line that does not have them."""


class _Event(Struct, tag_field="event", omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """An event at a time `at`."""

    at: float


class Opened(_Event, tag="opened"):
    """The first line of a file. `term` is the same in all files of one leadership; `number` counts them, from 1."""

    format: int
    namespace: str
    server: str
    term: str
    number: int


class Queued(_Event, tag="queued"):
    """A request arrived and waits. `waits_for` has the ids of the first requests that it waits for, holders first.

    A request without names is one with `anyOf`, which ends at once because too little was available.
    """

    id: int
    exclusive: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    transaction: str | None = None
    priority: float = 0
    queue_timeout_ms: float = TIMEOUT_MS
    transaction_timeout_ms: float = TIMEOUT_MS
    release_on_disconnect: bool = False
    principal: str | None = None
    note: str | None = None
    waits_for: tuple[int, ...] = ()


class Granted(Queued, tag="granted"):
    """A request arrived and was granted at once. A request with `anyOf` has the names that it was granted."""

    fence: int = 0


class Carried(Granted, tag="carried"):
    """A request of the time before the file. `at` is when it was granted; if `fence` is 0, when it began to wait.

    `deadline` is when it ends at the latest; None: never. `positions` are its positions in rearranged wait queues: negated
    priority and ticket by name.
    """

    deadline: float | None = None
    positions: dict[str, tuple[float, int]] | None = None


class Locked(_Event, tag="locked"):
    """A waiting request was granted."""

    id: int
    fence: int


class Released(_Event, tag="released"):
    """A request ended, held or waiting. `cycle` has the owners of a deadlock: transactions, or ids of requests without one."""

    id: int
    reason: Reason = Reason.SUCCESS
    cycle: tuple[str | int, ...] = ()


class Extended(_Event, tag="extended"):
    """A held lock got a new deadline, `transaction_timeout_ms` from now."""

    id: int
    transaction_timeout_ms: float


class Moved(_Event, tag="moved"):
    """A waiting request was moved in wait queues. `positions` as in `Carried`; None: it is at its own position again."""

    id: int
    positions: dict[str, tuple[float, int]] | None = None


class Gap(_Event, tag="gap"):
    """Events are missing here, because the disk was too slow: `dropped` batches of events."""

    dropped: int


Line = Opened | Carried | Granted | Queued | Locked | Released | Extended | Moved | Gap

encode_lines = json.Encoder().encode_lines
_decode = json.Decoder(Line).decode
_decode_lines = json.Decoder(Line).decode_lines


class UnreadableHistory(ValueError):
    """A file of the history is damaged, or was written by a version of Genie with another format."""


class OtherFormat(UnreadableHistory):
    """Another version of Genie has written a file of the history."""


def decode(text: bytes) -> list[Line]:
    """Decode lines. Raises UnreadableHistory for a damaged line and for a format that this version does not know."""
    try:
        lines: list[Line] = _decode_lines(text)
    except ValidationError as error:
        raise OtherFormat(f"another version of Genie has written this history: {error}") from None
    except ValueError as error:
        raise UnreadableHistory(f"damaged: {error}") from None
    return lines


def without_partial_line(text: bytes) -> bytes:
    """Return the complete lines of a file whose writer is still running, or was killed while it wrote the last line."""
    return text[: text.rfind(b"\n") + 1]
