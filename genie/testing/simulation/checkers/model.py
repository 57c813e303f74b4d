"""What a history says, put together: who asked for what, what the store held and when, which connections there were."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from genie.testing.simulation import history
from genie.testing.simulation.history import Change, Entry, Message
from genie.testing.simulation.loop import EPOCH_S

INFINITE = float("inf")
LATE_S = 0.0021
"""Times in the store are whole milliseconds of wall time, and deadlines are rounded up to one."""


@dataclass(slots=True)
class Conversation:
    """A connection, as the client and the server saw it."""

    number: int
    client: str
    server: str
    began: float
    session: str | None = None
    welcomed: bool = False
    timeout_ms: float = 0.0
    quiet: bool = False
    life: tuple[str | int, int] = ("", 0)
    """What knows the refs: the session and how many there were before by the same secret, or this connection."""
    bye_sent_at: float | None = None
    bye_answered_at: float | None = None
    client_left: float | None = None
    server_left: float | None = None

    @property
    def left(self) -> float | None:
        """When the first of the two learnt of its end."""
        ends = [at for at in (self.client_left, self.server_left) if at is not None]
        return min(ends) if ends else None


@dataclass(slots=True)
class Case:
    """One request: what was asked, and what became of it. Times are None where it did not happen."""

    id: int
    client: str
    payload: Message
    said_at: float
    conversation: Conversation
    life: tuple[str | int, int]
    """That of the conversation in which it was heard of first."""
    queued_at: float | None = None
    locked_at: float | None = None
    """Told for the first time."""
    fence: int = 0
    ended_at: float | None = None
    taken: list[str] = field(default_factory=list)
    """What it was told that it took, where it chose."""
    reason: str = ""
    heard_end: bool = False
    heard: set[int] = field(default_factory=set)
    """The conversations in which anything was told of it."""

    @property
    def owner(self) -> str | int:
        """Who asks."""
        transaction = self.payload.get("transactionName")
        return self.id if transaction is None else str(transaction)

    @property
    def modes(self) -> dict[str, str]:
        """Resource to mode; of a request that chooses, what it took."""
        if "anyOf" not in self.payload:
            return modes(self.payload["resources"])
        return {name: mode for name, mode in modes(self.payload["anyOf"]).items() if name in self.taken}


@dataclass(slots=True)
class Hold:
    """A lock as the store had it."""

    id: int
    record: Message
    granted_at: float
    """By what the record says; never later than it was stored."""
    stored_at: float
    not_before: float
    """When it may time out at the earliest."""
    gone_at: float | None = None


class Facts:
    """Grows entry by entry. `wrong` is what the judges found: when, and what.

    `tainted` has the requests that were told of on a way that did not last, and since when; `forsaken` the connections.
    """

    def __init__(self, tainted: dict[int, float], forsaken: set[int]) -> None:
        self._tainted = tainted
        self.forsaken = forsaken
        self.now = 0.0
        self.wrong: list[tuple[float, str]] = []
        self.conversations: dict[int, Conversation] = {}
        self.asked: dict[tuple[str, str], tuple[Message, float, Conversation]] = {}
        """By client and `ref`: the payload, when it was said first, and where."""
        self._said_last: dict[tuple[str, str], tuple[Message, float, Conversation]] = {}
        """The same, when and where it was said last."""
        self.cases: dict[int, Case] = {}
        self.by_ref: dict[tuple[str, str], int] = {}
        self._releases: dict[int, float] = {}
        """When the first release of an id was sent."""
        self._releases_by_ref: dict[tuple[str, str], float] = {}
        """When the first release without an id was sent, by client and ref of the request."""
        self._sessions: dict[str, int] = {}
        """How many sessions there were by each secret."""
        self._stored_ids: set[int] = set()
        """Requests that were ever in the store."""
        self.extends: dict[int, list[tuple[float, float]]] = {}
        self.known: dict[int, Message] = {}
        """The records of the store."""
        self.holds: dict[int, Hold] = {}
        self.next_id = 0
        self.led_since = 0.0
        """When the server that stores now began to."""
        self.leader = ""
        """Which that is."""
        self._epoch = 0
        self.began_at = 0.0
        """When it began to, where it may have before and may have forgotten what was not stored."""
        self.forgotten_below = 0
        """The store has lost what it knew of ids below this, and nobody was left who knew."""
        self.at_resume: dict[int, float] = {}
        """Conversation to when it was welcomed as a session that goes on."""

    def blame(self, at: float, text: str) -> None:
        """Something is wrong."""
        self.wrong.append((at, text))

    def exempt(self, id: int) -> bool:
        """Whether the store has forgotten a request, or the last of it, with all who knew of that."""
        return id < self.forgotten_below or self._tainted.get(id, INFINITE) <= self.now

    def release_sent_at(self, id: int) -> float:
        """When somebody first sent a release of a request; `INFINITE` if nobody did."""
        case = self.cases.get(id)
        if case is not None:
            found = [self._releases_by_ref.get((case.client, case.payload["ref"]))]
        else:  # its client was not told yet, so only its ref in the store is known
            ref = self.known.get(id, {}).get("ref")
            found = [at for (_, named), at in self._releases_by_ref.items() if named == ref]
        return min(at for at in (*found, self._releases.get(id), INFINITE) if at is not None)

    def see(self, entry: Entry) -> None:
        """Take in what happened."""
        match entry.kind:
            case history.OPEN:
                number = entry.connection
                self.conversations[number] = Conversation(number, entry.who, entry.what, entry.at, life=(number, 0))
            case history.LEFT:
                self._left(entry)
            case history.SAY:
                self._said(entry)
            case history.TELL:
                self._told(entry)
            case history.HEAR:
                self._heard(entry)
            case history.STORE:
                self._stored(entry, entry.what)

    # -- one kind each ------------------------------------------------------------------------------------

    def _left(self, entry: Entry) -> None:
        conversation = self.conversations[entry.connection]
        if entry.what.startswith("client"):
            conversation.client_left = conversation.client_left or entry.at
        else:
            conversation.server_left = conversation.server_left or entry.at

    def _said(self, entry: Entry) -> None:
        command, payload = entry.what["command"], entry.what["payload"]
        conversation = self.conversations[entry.connection]
        if command == "request":
            self.asked.setdefault((conversation.client, payload["ref"]), (payload, entry.at, conversation))
            self._said_last[conversation.client, payload["ref"]] = payload, entry.at, conversation
        elif command == "release" and "id" in payload:
            self._releases.setdefault(payload["id"], entry.at)
        elif command == "release":
            self._releases_by_ref.setdefault((conversation.client, payload["ref"]), entry.at)
        elif command == "bye":
            conversation.bye_sent_at = entry.at
        elif command == "extend":
            self.extends.setdefault(payload["id"], []).append((entry.at, payload["transactionTimeout"]))
        elif command == "hello":
            conversation.session = payload.get("session")
            conversation.timeout_ms = payload.get("sessionTimeout", 10_000)
            conversation.quiet = payload.get("quiet", False)

    def _told(self, entry: Entry) -> None:
        command, payload = entry.what["command"], entry.what["payload"]
        conversation = self.conversations[entry.connection]
        if command == "welcome":
            self._welcomed(conversation, payload["resumed"], entry.at)
        elif command == "bye":
            conversation.bye_answered_at = entry.at
        case = self.case(entry)
        if case is None:
            return
        case.heard.add(conversation.number)
        if command == "queued" and case.queued_at is None:
            case.queued_at = entry.at
        elif command == "locked" and case.locked_at is None:
            case.locked_at, case.fence, case.taken = entry.at, payload["fence"], payload.get("resources", [])
        elif command == "released" and case.ended_at is None:
            case.ended_at, case.reason = entry.at, payload["reason"]

    def _welcomed(self, conversation: Conversation, resumed: bool, at: float) -> None:
        conversation.welcomed = True
        if resumed:
            self.at_resume[conversation.number] = at
        elif conversation.session is not None:
            self._sessions[conversation.session] = self._sessions.get(conversation.session, 0) + 1
        if conversation.session is not None:
            conversation.life = conversation.session, self._sessions.get(conversation.session, 0)

    def case(self, entry: Entry) -> Case | None:
        """The request that a message to the client that made it is about."""
        payload, conversation = entry.what["payload"], self.conversations[entry.connection]
        if entry.what["command"] not in ("queued", "locked", "released"):
            return None
        id_, ref = payload["id"], payload.get("ref")
        case = self.cases.get(id_)
        if case is not None:
            return case if case.client == conversation.client else None
        if self._tainted.get(id_, INFINITE) <= self.now:
            return None  # the client heard it from another way: what it asks for by that `ref` on this one is new
        key = conversation.client, ref
        if key not in self.asked:
            return None
        asked, said_at, where = self.asked[key]
        if key in self.by_ref:
            asked, said_at, where = self._said_last[key]
            if where.life != conversation.life or not self.may_be_new(self.by_ref[key], conversation):
                return None
        self.by_ref[key] = id_
        case = self.cases[id_] = Case(id_, conversation.client, asked, said_at, where, conversation.life)
        return case

    def may_be_new(self, before: int, conversation: Conversation) -> bool:
        """Whether a ref that a request had before may make another one: its session is gone, or all was forgotten; or it
        ended in the batch in which it arrived, so that it was never stored, and the server is another.
        """
        case = self.cases[before]
        if self.exempt(before) or case.life != conversation.life:
            return True
        if case.ended_at is not None and before not in self._stored_ids:
            return case.conversation.server != conversation.server or case.ended_at < self.began_at
        return False

    def _heard(self, entry: Entry) -> None:
        case = self.case(entry)
        if case is not None and entry.what["command"] == "released":
            case.heard_end = True

    def _stored(self, entry: Entry, change: Change) -> None:
        self.next_id = change.counters[2]
        if entry.who != self.leader:
            self.leader, self.led_since = entry.who, entry.at
        if change.epoch != self._epoch or (change.place is not None and change.place.begins):
            self.began_at, self._epoch = entry.at, change.epoch
        if change.forgotten:
            self.forgotten_below = max([self.forgotten_below, *self.cases, *self.known, *self.holds]) + 1
        for id_ in change.gone:
            self.known.pop(id_, None)
            self._gone(id_, entry.at)
        self._stored_ids.update(change.written)
        for id_, record in change.written.items():
            self.known[id_] = record
            if record.get("state") == "ended":
                self._gone(id_, entry.at)
            elif record.get("state") != "queued":
                self._hold(id_, record, entry, change)

    def _gone(self, id: int, at: float) -> None:
        hold = self.holds.get(id)
        if hold is not None and hold.gone_at is None:
            hold.gone_at = at

    def _hold(self, id: int, record: Message, entry: Entry, change: Change) -> None:
        hold = self.holds.get(id)
        if hold is None or hold.gone_at is not None:
            granted_at = min(entry.at, record["since_unix_ms"] / 1000 - EPOCH_S)
            timeout_s = record.get("transaction_timeout_ms", 10_000) / 1000
            self.holds[id] = Hold(id, record, granted_at, entry.at, granted_at + timeout_s)
            hold = self.holds[id]
            extended = record["deadline"] - record["since"] - timeout_s * 1000
            if not -1e-3 <= extended <= 1.001 + 1e-3:  # it was granted and extended before it was stored
                self._extended(hold, record, change)
        elif hold.record["deadline"] != record["deadline"]:
            self._extended(hold, record, change)
        hold.record = record

    def _extended(self, hold: Hold, record: Message, change: Change) -> None:
        left_ms = record["deadline"] - change.counters[1]
        fitting = [
            said_at + ms / 1000 for said_at, ms in self.extends.get(hold.id, ()) if -1e-3 <= left_ms - ms <= 1.002
        ]
        if fitting:
            hold.not_before = min(fitting)
        elif not self.exempt(hold.id):
            self.blame(0.0, f"{hold.id} was extended to {left_ms} ms, and nobody asked for that")


def modes(resources: Any) -> dict[str, str]:
    """Resource to mode, the stronger one where both are named."""
    found: dict[str, str] = {}
    for resource in resources:
        mode, _, name = resource.partition(":")
        if found.get(name) != "exclusive":
            found[name] = mode
    return found


def stored_modes(record: Message) -> dict[str, str]:
    """The same of a record."""
    return dict.fromkeys(record.get("shared", ()), "shared") | dict.fromkeys(record.get("exclusive", ()), "exclusive")


class Judge:
    """Looks at each entry before and after the facts have it."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def before(self, entry: Entry) -> None:
        """Something has happened, and the facts are those from before."""

    def after(self, entry: Entry) -> None:
        """The facts have it."""

    def finish(self) -> None:
        """That was all."""
