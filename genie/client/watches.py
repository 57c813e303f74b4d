"""What is watched, and the difference between what whoever watches was told and what is.

A watch of a connection ends with it, or where the server says `lagged`. Then, and where too many changes wait for whoever
watches, the watch is `LAGGING`: it gets nothing any more, and when all that it has got is taken it asks the server anew,
on whatever connection there is. The answer is what is held now, so the watch tells the difference to what it told before:
an `unlocked` for what is gone, a `locked` for what is new. What was taken and given back meanwhile is not told.

So every `unlocked` follows a `locked` of the same resource and id. And whoever applies the changes never sees together
what can't be held together: where a lock is told that could not be granted beside another one, the end of the other is
told first.

An answer with more rows than the server tells is `truncated`. What is not in it may be held or not: it counts as held
until its `unlocked` comes, or a lock that could not be granted beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, Literal

from msgspec import Struct

from genie.client.commands import Call, Outcome, make_line
from genie.errors import GenieError
from genie.protocol.messages import Event, HeldRow, Watching
from genie.protocol.resources import check_name

MAX_BUFFERED_CHANGES: Final = 10_000
"""Changes that may wait for whoever watches before the watch falls behind; the rows of one answer may be more."""


class Change(Struct, frozen=True, gc=False):
    """A lock on `resource` (a name without a mode) was taken (`locked`) or given back (`unlocked`).

    `mode` is `shared` or `exclusive`, `id` the request's, `transaction` its name where it has one. A resource that is
    shared, or locked several times by one transaction, is held by several ids.
    """

    resource: str
    state: Literal["locked", "unlocked"]
    mode: str
    id: int
    transaction: str | None = None

    def excludes(self, other: Change) -> bool:
        """Whether a request can't be granted this resource while another one holds it."""
        if self.id == other.id or (self.transaction is not None and self.transaction == other.transaction):
            return False
        return "exclusive" in (self.mode, other.mode)


class State(Enum):
    """Whether what the server tells is for this watch."""

    LAGGING = auto()
    LIVE = auto()
    ENDED = auto()


LIVE: Final = State.LIVE


class Watch(Call):
    """`watch`, whose answer goes on. Nothing is sent before somebody wants a change.

    `changes` are to be taken, `held` is the picture that they lead to: by resource, then by id. `wanted`: somebody
    waits for a change.
    """

    __slots__ = ("changes", "error", "held", "prefix", "state", "truncated", "wants_next")

    def __init__(self, prefix: str) -> None:
        if prefix:
            check_name(prefix, "a prefix")
        super().__init__(make_line("watch", prefix=prefix))
        self.prefix = prefix
        self.state = State.LAGGING
        self.changes: deque[Change] = deque()
        self.held: dict[str, dict[int, Change]] = {}
        self.wants_next = self.truncated = False
        self.error: GenieError | None = None
        """Why it was refused, while nobody was there to be told."""

    @property
    def ended(self) -> bool:
        """Whether nothing will be told any more."""
        return self.state is State.ENDED

    def check(self) -> None:
        """Raise why it was refused, if nobody was told yet."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def apply_snapshot(self, rows: Sequence[HeldRow], truncated: bool) -> None:
        """What is held now."""
        self.truncated = truncated
        if not truncated:
            there = {(row.resource, row.id) for row in rows}
            for resource, id_ in [(name, id_) for name, by_id in self.held.items() for id_ in by_id]:
                if (resource, id_) not in there:
                    self.apply_unlocked(resource, id_)
        for row in rows:
            self.apply_locked(row)

    def apply_locked(self, row: HeldRow | Event.Payload) -> None:
        """A lock is held, which may have been told before."""
        change = Change(row.resource, "locked", row.mode, row.id, row.transactionName)
        beside = self.held.get(row.resource)
        if beside is None:
            self.held[row.resource] = {row.id: change}
            self.changes.append(change)
            return
        if row.id in beside:
            return
        for other in list(beside.values()):
            if change.excludes(other):
                self.apply_unlocked(other.resource, other.id)
        self.held.setdefault(row.resource, {})[row.id] = change
        self.changes.append(change)

    def apply_unlocked(self, resource: str, id: int) -> None:
        """A lock is not held any more; it may never have been told."""
        by_id = self.held.get(resource)
        gone = None if by_id is None else by_id.pop(id, None)
        if gone is not None:
            self.changes.append(Change(resource, "unlocked", gone.mode, id, gone.transaction))
            if not by_id:
                del self.held[resource]


class Unwatch(Call):
    """`unwatch`."""

    __slots__ = ()

    def __init__(self, prefix: str) -> None:
        super().__init__(make_line("unwatch", prefix=prefix))


class Watches:
    """All that are open. Several may have one prefix, each with a picture of its own.

    The methods that take `outcomes` add the watches whose waiting has an end.
    """

    def __init__(self) -> None:
        self._open: dict[Watch, None] = {}
        self._prefixes: set[str] = set()
        """Those that the server was asked for on this connection, and may tell of."""
        self._unanswered: set[Watch] = set()
        """Watches whose `watch` was sent on this connection and is not answered yet, also those that have ended."""

    def __bool__(self) -> bool:
        return bool(self._open)

    # -- by whoever watches -------------------------------------------------------------------------------

    def request_next(self, watch: Watch) -> None:
        """Somebody waits for a change of a watch that has none, and has not ended."""
        self._open[watch] = None
        watch.wants_next = True

    def close(self, watch: Watch, outcomes: list[Outcome]) -> bool:
        """Whether it was the last of a prefix that the server may tell of."""
        self._open.pop(watch, None)
        self._end(watch, None, outcomes)
        if watch.prefix not in self._prefixes or any(other.prefix == watch.prefix for other in self._open):
            return False
        self._prefixes.discard(watch.prefix)
        return True

    def close_all(self, outcomes: list[Outcome]) -> None:
        """The client is to be closed."""
        for watch in list(self._open):
            self.close(watch, outcomes)

    def all(self) -> list[Watch]:
        """All that are open."""
        return list(self._open)

    # -- by the connection --------------------------------------------------------------------------------

    def to_send(self) -> Iterator[Watch]:
        """Those that are to be asked for."""
        return (watch for watch in list(self._open) if self._must_send(watch))

    def on_sent(self, watch: Watch) -> None:
        """It is asked for."""
        self._unanswered.add(watch)
        self._prefixes.add(watch.prefix)

    def on_watching(self, watch: Watch, told: Watching.Payload, outcomes: list[Outcome]) -> None:
        """The answer."""
        self._unanswered.discard(watch)
        if watch.state is State.LAGGING:
            watch.state = State.LIVE
            watch.apply_snapshot(told.held, told.truncated)
            self._wake(watch, outcomes)

    def on_rejected(self, watch: Watch, error: GenieError, outcomes: list[Outcome]) -> None:
        """It will not be answered."""
        self._unanswered.discard(watch)
        self._open.pop(watch, None)
        watch.error = error if watch.waiter is None else None
        self._end(watch, error, outcomes)

    def on_event(self, told: Event.Payload, outcomes: list[Outcome]) -> None:
        """Something was locked or unlocked."""
        for watch in self._open:
            if watch.state is not LIVE or not told.resource.startswith(watch.prefix):
                continue
            if len(watch.changes) >= MAX_BUFFERED_CHANGES:
                watch.state = State.LAGGING
            elif told.state == "locked":
                watch.apply_locked(told)
            elif told.state == "unlocked":
                watch.apply_unlocked(told.resource, told.id)
            if watch.wants_next:
                self._wake(watch, outcomes)

    def on_lagged(self) -> None:
        """The server has ended all watches of this connection.

        It has yet to read each `watch` that is not answered, and begins to watch that prefix then. That also holds where
        the watch has ended here meanwhile: its prefix stays, so that whoever is the last to end sends `unwatch`.
        """
        self._prefixes &= {watch.prefix for watch in self._unanswered}
        for watch in self._open:
            watch.state = State.LAGGING

    def on_disconnected(self) -> None:
        """The connection is gone, and what was asked on it."""
        self._unanswered.clear()
        self.on_lagged()

    # -- inside -------------------------------------------------------------------------------------------

    def _must_send(self, watch: Watch) -> bool:
        return watch.wants_next and watch not in self._unanswered and watch.state is State.LAGGING

    def _wake(self, watch: Watch, outcomes: list[Outcome]) -> None:
        if watch.wants_next and watch.changes:
            watch.wants_next = False
            outcomes.append((watch, None, None))

    def _end(self, watch: Watch, error: GenieError | None, outcomes: list[Outcome]) -> None:
        watch.state = State.ENDED
        watch.changes.clear()
        watch.held.clear()
        if watch.wants_next:
            watch.wants_next = False
            outcomes.append((watch, None, error))
