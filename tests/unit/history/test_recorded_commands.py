"""The lines of commands that a pipeline records are read as what its lock manager did, whatever the clients send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import chain
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from genie import core
from genie.access import ADMIN, Principal
from genie.config import Limits
from genie.core import SUCCESS, Command, Event, LockManager, Origin, Request
from genie.history.archiver import archive_complete
from genie.history.recorder import Recorder
from genie.history.records import Carried, Granted, Line, Locked, Opened
from genie.history.redaction import Redaction
from genie.history.replay import Replay
from genie.history.retention import Retention
from genie.history.segments import list_segments, recorded_terms
from genie.history.writer import HistoryWriter
from genie.observability.stats import Stats
from genie.server.connection import Connection
from genie.server.listener import AdmissionControl
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch, LeadershipLost
from support.core.history_recording import T0
from support.core.sliced_pipeline import expire
from support.network.recording_transport import RecordingTransport

NAMES = [
    "a",
    "b",
    "c",
    *(f"name/{number}" for number in range(30)),
    "ä/1",
    'e"f',
    "g\\h",
    "\u2028i",
    "secret/1",
    "secret/2",
]
PRINCIPALS = [None, Principal("billing"), Principal("reports"), Principal("operator", permissions=frozenset((ADMIN,)))]
SESSION_NOTES = ["worker 1@a", "worker 2@a", 'ö"']
LONG_S = 1e9
"""No timer of a pipeline fires in a test."""


def recorder(directory: Path, manager: LockManager, redacted: tuple[str, ...]) -> tuple[Recorder, HistoryWriter]:
    writer = HistoryWriter(directory, "main", "127.0.0.1:0", Retention())
    return Recorder(writer, manager, Redaction(redacted, b"key")), writer


def lines_of(directory: Path) -> list[Line]:
    return list(chain.from_iterable(recorded_terms(directory, 0, 1e18)))


def events_of(directory: Path) -> list[Line]:
    """Return the lines of what happened. Where files begin, and the deadlines of carried requests, depend on a thread."""
    return [line for line in lines_of(directory) if not isinstance(line, Opened | Carried)]


class ObservedLockManager(LockManager):
    """Records all events of all steps itself, without the server and without the lines of commands."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(next_id=1_000, next_fence=77, unix_offset_ms=T0)
        self._clock = clock
        self._is_in_step = False
        self.recorder: Recorder | None = None

    def _record(self, events: list[Event], now: float) -> None:
        if events and self.recorder is not None and not self._is_in_step:
            self.recorder.on_events(events, now)
            self.recorder.on_stored()

    def step(self, command: Command, now: float) -> list[Event]:
        self._is_in_step = True
        events = super().step(command, now)
        self._is_in_step = False
        self._record(events, now)
        return events

    def request(self, request: Request, now: float, max_queue_entries: float = inf) -> list[Event]:
        events = super().request(request, now, max_queue_entries)
        self._record(events, now)
        return events

    def release(self, id: int, now: float) -> list[Event]:
        events = super().release(id, now)
        self._record(events, now)
        return events

    def grant_if_uncontended(self, request: Request, now: float) -> bool:
        granted = super().grant_if_uncontended(request, now)
        if granted:
            self._record([core.Granted(request)], now)
        return granted

    def release_if_uncontended(self, id: int, origin: Origin) -> Request | None:
        request = super().release_if_uncontended(id, origin)
        if request is not None:
            self._record([core.Released(request, SUCCESS)], self._clock())
        return request


class SlowStore(MemoryStore):
    """A durable store whose commits the test acknowledges."""

    durable = True

    def __init__(self) -> None:
        self.pending: list[Callable[[BaseException | None], None]] = []

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        self.pending.append(done)

    def acknowledge(self, error: BaseException | None = None) -> None:
        pending, self.pending = self.pending, []
        for done in pending:  # may commit again
            done(error)


class Server:
    """A pipeline that records, and clients that send random lines, at times that the test chooses."""

    def __init__(self, directory: Path, random: Random, *, is_durable: bool, redacted: tuple[str, ...]) -> None:
        self.random = random
        self.now = 0.0
        self.manager = ObservedLockManager(lambda: self.now)
        for number in range(20):  # requests of the leader before, some of which wait
            self.manager.step(Request((), (NAMES[number % 7],), transaction=f"t{number % 4}"), 0)
        self.observer, self.observed = recorder(directory / "observed", self.manager, redacted)
        for _ in self.observer.write_snapshot():
            pass
        self.manager.recorder = self.observer
        self.store = SlowStore() if is_durable else MemoryStore()
        self.failures: list[BaseException] = []
        self.recorder, self.writer = recorder(directory / "recorded", self.manager, redacted)
        self.pipeline = Pipeline(
            self.manager, self.store, Limits(max_requests_per_connection=40, max_queue=8), Stats(), lambda: self.now,
            self.failures.append, lease_s=LONG_S, store_timeout_s=LONG_S, recorder=self.recorder,
        )  # fmt: skip
        self.ids = [1_000]
        self.acknowledged: set[int] = set()
        """Ids of the requests whose grants a client was told."""
        self.admission: AdmissionControl[Connection] = AdmissionControl(Limits())
        self.connections: list[Connection] = []
        for _ in range(4):
            self.connect()

    def connect(self) -> None:
        connection = Connection(self.pipeline, Limits(), self.admission)
        connection.connection_made(RecordingTransport(self.receive))
        connection.principal = self.random.choice(PRINCIPALS)
        hello: dict[str, Any] = {}
        if self.random.random() < 0.4:
            hello |= {"session": f"0123456789abcde{self.random.randrange(4)}", "sessionTimeout": 50}
        if self.random.random() < 0.5:
            hello["note"] = self.random.choice(SESSION_NOTES)
        if hello:
            connection.data_received(self.line("hello", hello) + b"\n")
        self.connections.append(connection)

    def receive(self, data: bytes) -> None:
        for message in map(json.loads, data.splitlines()):
            id_ = (message.get("payload") or {}).get("id")
            if id_ is not None:
                self.ids.append(id_)
            if message["command"] == "locked":
                self.acknowledged.add(id_)

    # -- lines --------------------------------------------------------------------------------------------

    def line(self, command: str, payload: dict[str, Any]) -> bytes:
        """Return a line in a random one of the spellings that clients may use."""
        random = self.random

        def encode(value: Any) -> str:
            text = json.dumps(value, ensure_ascii=random.random() < 0.5)
            return f'"\\u{ord(value[0]):04x}{text[2:]}' if text[:2] == '"a' and random.random() < 0.5 else text

        fields = [f"{encode(name)}:{encode(value)}" for name, value in payload.items()]
        if fields and random.random() < 0.1:  # of a duplicate key, the last value counts
            fields.insert(
                0, f"{fields[0].partition(':')[0]}:{random.choice(['3', '[[]]', 'null', fields[-1].partition(':')[2]])}"
            )
        if random.random() < 0.05:
            fields.append('"namespace":' + random.choice(["null", '"genie"', '"other"']))
        parts = [f'"command":{encode(command)}', f'"payload":{{{" , ".join(fields)}}}']
        random.shuffle(parts)
        if random.random() < 0.02:
            parts.insert(0, random.choice(['"event":"granted"', '"payload":[]']))
        margin = random.choice(["", "", "", " ", "\t", "\r"])
        return (margin + "{" + ",".join(parts) + "}" + random.choice(["", "", "\r", " " * 9_000])).encode()

    def random_line(self) -> bytes:  # noqa: PLR0911 - one for each kind
        random = self.random
        kind = random.random()
        payload: dict[str, Any] = {"ref": f"r{random.randrange(30)}"} if random.random() < 0.2 else {}
        if kind < 0.45:
            names = random.sample(NAMES, random.choice([1, 1, 2, 3]))
            payload["resources"] = [random.choice(["exclusive:", "exclusive:", "shared:"]) + name for name in names]
            for name, values in (
                ("queueTimeout", [0, 5, 50.5, 2_147_483_647]),
                ("transactionTimeout", [1, 20.25, 10_000]),
                ("transactionName", ["t1", "t2", "t3"]),
                ("priority", [-0.0, 1, -2.5]),
                ("onDisconnect", ["keep", "release"]),
                ("note", ["nightly", 'ä"']),
            ):
                if random.random() < 0.3:
                    payload[name] = random.choice(values)
            return self.line("request", payload)
        if kind < 0.52:
            names = random.sample(NAMES, 3)
            choices = [random.choice(["exclusive:", "shared:"]) + name for name in names]
            return self.line("request", {**payload, "anyOf": choices, "target": random.choice([1, "2"]), "note": "any"})
        if kind < 0.82:
            return self.line("release", {**payload, "id": random.choice(self.ids[-20:])})
        if kind < 0.86:
            return self.line("release", {"ref": f"r{random.randrange(30)}"})
        if kind < 0.9:
            return self.line(
                "extend", {"id": random.choice(self.ids[-20:]), "transactionTimeout": random.choice([5, 500])}
            )
        if kind < 0.96:
            command = random.choice(["inspect", "watch", "unwatch", "ping"])
            return self.line(command, {"prefix": ""} if "watch" in command else {})
        return random.choice([b"", b"\r", b"nonsense", b'{"command":"bye"}', b'{"event":"released","at":1,"id":1}'])

    # -- steps --------------------------------------------------------------------------------------------

    async def run(self, steps: int) -> None:
        random = self.random
        for _ in range(steps):
            kind = random.random()
            if kind < 0.55:
                lines = [self.random_line() for _ in range(random.choice([1, 1, 1, 2, 5, 60]))]
                random.choice(self.connections).data_received(b"".join(line + b"\n" for line in lines))
            elif kind < 0.75:
                await asyncio.sleep(0)
            elif kind < 0.88:
                self.now += random.choice([0.25, 1, 7.5, 40])
            elif kind < 0.92:
                expire(self.pipeline)
            elif kind < 0.96:
                lost = self.connections.pop(random.randrange(len(self.connections)))
                lost.connection_lost(None)
                self.connect()
            else:
                self.recorder._on_timer()
            if isinstance(self.store, SlowStore) and random.random() < 0.5:
                self.store.acknowledge()

    async def recover(self) -> None:
        """Recover, also if that takes so long that changes are stored meanwhile."""
        recovery = asyncio.create_task(self.pipeline.recover([]))
        while not recovery.done():
            await asyncio.sleep(0)
            if isinstance(self.store, SlowStore):
                self.store.acknowledge()
        await recovery

    async def finish(self) -> None:
        """Execute and store everything that was sent."""
        while self.pipeline._scheduler or self.pipeline._scheduled or self.pipeline._commits.in_flight:
            await asyncio.sleep(0)
            if isinstance(self.store, SlowStore):
                self.store.acknowledge()

    def stop(self) -> None:
        self.pipeline.stop()
        self.observer.stop()
        for writer in (self.writer, self.observed):
            writer.join(10)
            assert not writer._has_failed


@pytest.mark.parametrize("seed", range(10))
async def test_the_lines_that_clients_send_are_read_as_what_the_lock_manager_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = Random(seed)  # noqa: S311 - not a secret
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", random.choice([8_000, 16 << 20]))
    monkeypatch.setattr("genie.history.recorder.WRITTEN_BYTES", random.choice([1, 2_000]))
    monkeypatch.setattr("genie.history.recorder.JOINED_LINES", random.choice([1, 32]))
    redacted = ("secret/", "t2") if seed % 3 == 0 else ()
    server = Server(tmp_path, random, is_durable=seed % 4 != 0, redacted=redacted)
    await server.recover()
    await server.run(120)
    await server.finish()
    server.stop()
    assert server.failures == []
    recorded = events_of(tmp_path / "recorded")
    assert recorded == events_of(tmp_path / "observed")
    assert sum(isinstance(line, Granted) for line in recorded) > 20
    replay = Replay()
    replay.run(lines_of(tmp_path / "recorded"))
    assert replay.manager.table.held.keys() == server.manager.table.held.keys()
    assert replay.manager.table.waiting.keys() == server.manager.table.waiting.keys()
    archive_complete(tmp_path / "recorded")
    assert all(segment.is_archived for segment in list_segments(tmp_path / "recorded"))
    assert events_of(tmp_path / "recorded") == recorded


async def test_a_request_is_recorded_with_the_note_of_its_session(tmp_path: Path) -> None:
    server = Server(tmp_path, Random(0), is_durable=False, redacted=())  # noqa: S311 - not a secret
    await server.recover()
    connections = []
    for hello in (b'{"note":"worker 1"}', b'{"note":"worker 2","session":"0123456789abcdef"}', b"{}"):
        connection = Connection(server.pipeline, Limits(), server.admission)
        connection.connection_made(RecordingTransport(server.receive))
        connection.data_received(b'{"command":"hello","payload":%b}\n' % hello)
        connections.append(connection)
    expected: dict[str, str | None] = {}
    for number, which in enumerate([0, 1, 1, 2, 0, 2]):
        server.now += number % 2
        connections[1].data_received(b'{"command":"ping","payload":{}}\n')  # needs no line
        connections[which].data_received(
            b'{"command":"request","payload":{"resources":["exclusive:new%d"]%b}}\n'
            % (number, b',"note":"own"' if number == 2 else b"")
        )
        expected[f"new{number}"] = "own" if number == 2 else ["worker 1", "worker 2", None][which]
        await server.finish()
        if number == 3:
            server.recorder.flush()
    server.stop()
    recorded = events_of(tmp_path / "recorded")
    assert {line.exclusive[0]: line.note for line in recorded if isinstance(line, Granted)} == expected
    assert recorded == events_of(tmp_path / "observed")


@pytest.mark.parametrize("seed", range(6))
async def test_what_clients_know_is_recorded_if_the_leadership_is_lost(tmp_path: Path, seed: int) -> None:
    server = Server(tmp_path, Random(seed), is_durable=True, redacted=())  # noqa: S311 - not a secret
    await server.recover()
    await server.run(200)
    assert isinstance(server.store, SlowStore)
    connection = Connection(server.pipeline, Limits(), server.admission)
    connection.connection_made(RecordingTransport(server.receive))
    # Not a random line: a random namespace would reject it, and it would never be locked.
    connection.data_received(b'{"command":"request","payload":{"resources":["exclusive:lost"]}}\n')
    locked = server.manager.table.uncontended
    while "lost" not in locked:
        server.store.acknowledge()
        if "lost" not in locked:
            await asyncio.sleep(0)
    server.store.acknowledge(LeadershipLost("another server leads"))
    server.stop()
    recorded, observed = events_of(tmp_path / "recorded"), events_of(tmp_path / "observed")
    assert recorded == observed[: len(recorded)]
    assert ("lost",) in [line.exclusive for line in observed[len(recorded) :] if isinstance(line, Granted)]
    assert len(server.acknowledged) > 5
    assert server.acknowledged <= {line.id for line in recorded if isinstance(line, Granted | Locked)}


@pytest.mark.parametrize("seed", range(3))
async def test_a_file_that_ends_anywhere_has_what_happened_before(tmp_path: Path, seed: int) -> None:
    random = Random(seed)  # noqa: S311 - not a secret
    server = Server(tmp_path, random, is_durable=False, redacted=())
    await server.recover()
    await server.run(50)
    server.stop()
    whole = events_of(tmp_path / "recorded")
    (segment,) = list_segments(tmp_path / "recorded")
    content = segment.path.read_bytes()
    for _ in range(20):
        segment.path.write_bytes(content[: random.randrange(content.index(b"\n") + 1, len(content))])
        lines = events_of(tmp_path / "recorded")
        assert lines == whole[: len(lines)]
