"""The bound of the disk: at no moment have the files of a directory more bytes than the retention allows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, Self

import pytest
from click.testing import CliRunner

from genie.cli import main
from genie.core import Extend, LockManager, Request
from genie.history import records
from genie.history.archiver import archive_complete, clean_up, shrink
from genie.history.records import Carried, Gap, Opened
from genie.history.replay import Replay, UnknownState
from genie.history.retention import Retention
from genie.history.search import Query, search
from genie.history.segments import RAW, list_segments, recorded_terms
from genie.history.writer import ROOM_CHECK_S, HistoryWriter
from genie.protocol import commands
from support.core.history_recording import PRINCIPALS, T0, Recording, release_line
from support.processes.waiting import wait_until

MIB = 1 << 20
AGES_S = 40_000 * 86_400.0


class MeasuredFile:
    """A file after each write to which a function is called."""

    def __init__(self, file: Any, measure: Callable[[], None]) -> None:
        self._file, self._measure = file, measure

    def __getattr__(self, name: str) -> Any:
        return measured(getattr(self._file, name), self._measure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()
        self._measure()


def measured(function: Callable[..., Any], measure: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that measures after each call."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        measure()
        return result

    return call


class Sizes:
    """The bytes of a directory, measured after each call that may change them."""

    def __init__(self, directory: Path, retention: Retention) -> None:
        self.directory, self.retention = directory, retention
        self.measured = self.peak = 0
        self.exceeded: list[tuple[int, int]] = []

    def measure(self) -> None:
        raw = other = 0
        for entry in os.scandir(self.directory):
            size = entry.stat().st_size
            if entry.name.endswith((RAW, f"{RAW}.part")):
                raw += size
            else:
                other += size
        self.measured += 1
        self.peak = max(self.peak, raw + other)
        # Each part has a bound of its own, so that a server and an archiver keep the bound together in every order.
        if raw > self.retention.raw_bytes or other > self.retention.max_bytes - self.retention.raw_bytes:
            self.exceeded.append((raw, other))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Measure after each call that may change the size of a file, in this process."""
        with pytest.MonkeyPatch.context() as patch:
            fdopen = os.fdopen
            patch.setattr(os, "fdopen", lambda *arguments: MeasuredFile(fdopen(*arguments), self.measure))
            for name in ("rename", "unlink", "write_bytes"):
                patch.setattr(Path, name, measured(getattr(Path, name), self.measure))
            yield
        assert self.exceeded == []


@pytest.fixture
def archiving(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Archive in the thread of the writer, at once. Return a list to which the numbers of dropped writes are appended."""
    dropped: list[int] = []

    def archive(writer: HistoryWriter) -> None:
        if writer._archiver.due_at_s is not None:
            writer._archiver.due_at_s, writer._recount_at_s = None, 0
            dropped.append(clean_up(writer.directory, writer.retention))

    monkeypatch.setattr(HistoryWriter, "_archive", archive)
    return dropped


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def fat_name(random: Random) -> str:
    """Return a name of 512 characters of four bytes, which can hardly be compressed."""
    return "".join(chr(0x10000 + number) for number in memoryview(random.randbytes(1024)).cast("H"))


def record(recording: Recording, count: int, random: Random, *, released: float = 0.0) -> None:
    """Record locks with fat names, 20 in each write."""
    for now in range(count):
        request = recording.request(now, fat_name(random), transaction_timeout_ms=1e9)
        if random.random() < released:
            recording.release(now, request)
        if now % 20 == 0:
            recording.recorder.flush()
            wait_until(lambda: not recording.writer._queued_sizes)


@pytest.mark.parametrize("as_lines", [True, False])
@pytest.mark.parametrize("released", [0.0, 0.9])
async def test_fat_locks_never_exceed_the_bound(
    tmp_path: Path, archiving: list[int], as_lines: bool, released: float
) -> None:
    retention, random = Retention(MIB, AGES_S), Random(1)  # noqa: S311 - not a secret
    sizes, manager = Sizes(tmp_path, retention), LockManager(unix_offset_ms=T0)
    with sizes.watch():
        for _start in range(2):  # the second one takes over what the first one has held
            recording = Recording(tmp_path, manager=manager, as_lines=as_lines, retention=retention)
            record(recording, 600, random, released=released)
            recording.stop()
        clean_up(tmp_path, retention)
    assert sizes.measured > 300
    assert MIB // 2 < sizes.peak <= MIB
    assert recording.writer.dropped + sum(archiving) > 0
    assert len(search(tmp_path, Query(limit=10_000)).requests) > 50


async def test_nothing_is_dropped_without_a_reason(tmp_path: Path, archiving: list[int]) -> None:
    retention, random = Retention(2 * MIB, AGES_S), Random(2)  # noqa: S311 - not a secret
    sizes = Sizes(tmp_path, retention)
    with sizes.watch():
        recording = Recording(tmp_path, retention=retention)
        record(recording, 2_400, random, released=1.0)
        recording.stop()
    assert recording.writer.dropped + sum(archiving) == 0
    assert search(tmp_path, Query()).gaps == 0
    assert sizes.peak > 1.2 * MIB  # the oldest files were deleted, not more


@pytest.mark.usefixtures("archiving")
async def test_what_another_setting_has_left_is_deleted_before_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, narrow, random = Retention(64 * MIB, AGES_S), Retention(MIB, AGES_S), Random(3)  # noqa: S311
    for _start in range(2):
        recording = Recording(tmp_path, retention=wide)
        record(recording, 1_500, random)
        recording.stop()
    with monkeypatch.context() as patch:  # a server that was killed: its files are not archived
        patch.setattr(HistoryWriter, "_archive", lambda _self: None)
        recording = Recording(tmp_path, retention=wide)
        record(recording, 1_500, random)
        recording.stop()
    (tmp_path / f"{list_segments(tmp_path)[0].stem}{RAW}.damaged").write_bytes(bytes(MIB))
    assert bytes_of(tmp_path) > 8 * MIB
    shrink(tmp_path, narrow)
    sizes = Sizes(tmp_path, narrow)
    sizes.measure()
    with sizes.watch():
        recording = Recording(tmp_path, retention=narrow)
        record(recording, 500, random, released=0.9)
        recording.stop()
    assert sizes.measured > 100
    assert len(search(tmp_path, Query(limit=10_000)).requests) > 50


async def test_a_writer_shrinks_the_directory_before_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    real = HistoryWriter._create_next_file
    monkeypatch.setattr("genie.history.writer.shrink", lambda *_arguments: calls.append("shrink"))
    monkeypatch.setattr(HistoryWriter, "_create_next_file", lambda writer: (calls.append("open"), real(writer))[1])
    Recording(tmp_path).stop()
    assert calls == ["shrink", "open"]


async def test_an_index_that_is_larger_than_its_events_keeps_to_the_bound(
    tmp_path: Path, archiving: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.history.segments.BLOCK_BYTES", 2 << 10)
    retention = Retention(2 * MIB, AGES_S)
    sizes = Sizes(tmp_path, retention)
    with sizes.watch():
        recording = Recording(tmp_path, retention=retention)
        held = [recording.request(0, *(f"{a}/{b}" for b in range(250))) for a in range(60)]
        for now in range(2_000):  # a short line about 250 names
            recording.step(Extend(held[now % 60].id, 1e9), 0)
            if now % 50 == 0:
                recording.recorder.flush()
        recording.stop()
    assert recording.writer.dropped == 0
    assert sum(archiving) > 0
    assert search(tmp_path, Query()).gaps > 0


async def test_files_of_another_version_leave_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retention = Retention(MIB, AGES_S)
    for number in range(4):
        other = tmp_path / f"2099010{number + 1}T000000.000000Z-00000000-000001.jsonl"
        other.write_text('{"event":"promoted","at":1}\n' * 2_000)
    clean_up(tmp_path, retention)
    left = bytes_of(tmp_path)
    assert 0 < left <= retention.raw_bytes // 2
    assert "another version" in capsys.readouterr().err


@pytest.mark.usefixtures("archiving")
async def test_a_snapshot_is_as_rare_as_its_size_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 1_000)
    monkeypatch.setattr("genie.history.writer.SEGMENT_S", 0)
    recording = Recording(tmp_path, retention=Retention(max_age_s=AGES_S))
    for now in range(300):
        recording.request(0, f"held/{now}", transaction_timeout_ms=1e9)
    recording.recorder.flush()
    for now in range(2_000):
        recording.release(now, recording.request(now, "short"))
        recording.recorder.flush()
    recording.stop()
    carried = events = 0
    for segment in list_segments(tmp_path)[:-1]:
        for line in chain.from_iterable(segment.read()):
            if isinstance(line, Carried):
                carried += len(records.encode(line))
            elif not isinstance(line, Opened):
                events += len(records.encode(line))
    assert 3 < len(list_segments(tmp_path)) < 20
    assert carried < 1.2 * events


async def test_a_writer_without_room_for_the_next_file_does_not_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.history.writer.SEGMENT_S", 0)
    waits: list[float | None] = []

    class RecordingQueue(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            waits.append(timeout)
            return super().get(block, timeout)

    monkeypatch.setattr("genie.history.writer.SimpleQueue", RecordingQueue)
    monkeypatch.setattr(HistoryWriter, "_has_room", lambda _writer, _file, count, *_reserved: count > 0)
    recording = Recording(tmp_path)
    recording.request(0, "a")
    recording.recorder.flush()
    recording.stop()
    assert set(waits) == {None, ROOM_CHECK_S}  # None: the file had no events


@pytest.mark.usefixtures("archiving")
async def test_a_file_without_many_events_is_complete_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.history.writer.SEGMENT_S", 0)
    manager = LockManager(unix_offset_ms=T0)
    for now in range(300):
        manager.step(Request((), (f"held/{now}",)), now)
    for age_s, files in ((1e9, 1), (0, 2)):
        monkeypatch.setattr("genie.history.writer.MAX_SEGMENT_S", age_s)
        directory = tmp_path / str(files)
        recording = Recording(directory, manager=manager, retention=Retention(max_age_s=AGES_S))
        recording.request(now, f"more/{files}")
        recording.stop()
        assert len(list_segments(directory)) == files


def record_without_snapshot(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Request]:
    """Record three files of one leadership. What is held at the begin of the second one is too large for a snapshot."""
    with monkeypatch.context() as patch:
        patch.setattr("genie.history.retention.SEGMENT_BYTES", 1)
        patch.setattr(Retention, "snapshot_bytes", property(lambda _self: 200))
        recording = Recording(directory)
        made = {name: recording.request(at, name) for at, name in enumerate(("a", "b", "c"))}
        recording.recorder.flush()
        for at, name in ((10, "a"), (20, "b"), (30, "c")):
            recording.release(at, made[name])
            if name == "b":
                recording.recorder.flush()
        made["d"] = recording.request(31, "d")
        recording.recorder.flush()
        recording.request(40, "e")
        recording.stop()
        archive_complete(directory)
    return made


async def test_a_replay_begins_with_the_file_before_one_without_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record_without_snapshot(tmp_path, monkeypatch)
    first, second, third, fourth, _fifth = list_segments(tmp_path)
    assert [each.is_self_contained for each in (first, second, third, fourth)] == [True, False, False, True]
    opened = next(line.at for line in chain.from_iterable(second.read()) if isinstance(line, Opened))
    (lines,) = recorded_terms(tmp_path, opened, 1e18)
    replay = Replay()
    replay.run(lines)
    assert (replay.grants, replay.ends) == (5, 3)
    ended = {entry.id: entry.ended_at for entry in search(tmp_path, Query(since=T0 + 15)).requests}
    assert ended[made["b"].id] == T0 + 20
    assert ended[made["c"].id] == T0 + 30
    assert search(tmp_path, Query()).gaps == 0


@pytest.mark.parametrize("arguments", [[], ["--what-if", "removed"], ["--json"]])
async def test_a_replay_says_that_a_snapshot_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    made = record_without_snapshot(tmp_path / "genie", monkeypatch)
    first, *_others = list_segments(tmp_path / "genie")
    first.path.unlink()
    with pytest.raises(UnknownState):
        Replay().run(chain.from_iterable(recorded_terms(tmp_path / "genie", 0, 1e18)))
    result = CliRunner().invoke(main, ["replay", "--history-dir", str(tmp_path), *arguments])
    if "--what-if" in arguments:
        assert result.exit_code == 0
        assert "Events are missing in 1 places" in result.output
    else:
        assert result.exit_code == 1
        assert "no replay can begin at" in result.output
        assert "--history-max-mb" in result.output
    assert search(tmp_path / "genie", Query()).gaps == 1
    assert made["d"].id in {entry.id for entry in search(tmp_path / "genie", Query()).requests}


@pytest.mark.usefixtures("archiving")
async def test_a_leader_that_takes_over_too_much_records_only_what_follows(tmp_path: Path) -> None:
    manager = LockManager(unix_offset_ms=T0)
    for number in range(3_000):
        manager.step(Request((), (f"held/{number % 2_000}",)), 0)
    recording = Recording(tmp_path, manager=manager, retention=Retention(MIB, AGES_S))
    new = recording.request(1, "new")
    recording.stop()
    (segment,) = list_segments(tmp_path)
    gaps = [line.live for line in chain.from_iterable(segment.read()) if isinstance(line, Gap)]
    assert gaps == [3_000]
    assert not segment.is_self_contained
    assert recording.writer.dropped == 1
    result = search(tmp_path, Query())
    assert ([entry.id for entry in result.requests], result.gaps) == ([new.id], 1)


async def test_a_file_whose_predecessor_was_deleted_is_archived_without_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 1)
    recording = Recording(tmp_path)
    recording.request(0, "a")
    recording.recorder.flush()
    recording.request(1, "b")
    recording.stop()
    first, *others = list_segments(tmp_path)
    first.path.unlink()
    archive_complete(tmp_path)
    assert [segment.is_self_contained for segment in list_segments(tmp_path)] == [False] * len(others)
    assert search(tmp_path, Query()).gaps == 1


async def test_events_are_dropped_while_the_archiver_makes_no_room(tmp_path: Path) -> None:
    retention = Retention(MIB, AGES_S)
    recording = Recording(tmp_path, retention=retention)
    random = Random(4)  # noqa: S311 - not a secret
    record(recording, 300, random)
    assert recording.writer.dropped > 0
    archive_complete(tmp_path, retention)
    recording.writer._recount_at_s = 0
    kept = recording.request(1_000, "kept")
    recording.stop()
    result = search(tmp_path, Query(limit=10_000))
    assert result.requests[-1].id == kept.id
    assert result.gaps == 1


async def test_padded_lines_are_recorded_without_their_padding(tmp_path: Path) -> None:
    recording = Recording(tmp_path, as_lines=True)
    padded = [
        b'{"command":"request","payload":{"resources":["exclusive:a"],"note":"n"' + b" " * 100_000 + b"}}",
        b'{"command":"request",' + b'"command":"request",' * 5_000 + b'"payload":{"resources":["exclusive:b"]}}',
        b'{"command":"request","payload":{"resources":["exclusive:' + b"\\u0063" * 500 + b'"],"priority":5}}',
        release_line(1) + b" " * 100_000,
    ]
    recording.recorder.begin_turn(0, PRINCIPALS["billing"]).extend(padded)
    recording.recorder.on_stored()
    recording.stop()
    (segment,) = list_segments(tmp_path)
    lines = segment.path.read_bytes().splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) < 1_000
    assert [line for line in chain.from_iterable(segment.read()) if not isinstance(line, Opened)] == (
        records.RawDecoder().decode(b"\n".join([lines[1], *padded]))
    )


@pytest.mark.parametrize("redacted", [(), ("secret/",)])
async def test_long_lines_are_decoded_with_the_batch_that_stores_them(
    tmp_path: Path, redacted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = list[int]()
    read = commands.read

    def record(line: bytes) -> object:
        decoded[-1] += len(line)
        return read(line)

    recording = Recording(tmp_path, redacted, as_lines=True)
    monkeypatch.setattr(commands, "read", record)
    line = b'{"command":"request","payload":{"resources":["exclusive:a"]' + b" " * 100_000 + b"}}"
    for now in range(8):
        decoded.append(0)
        recording.recorder.begin_turn(now, None).append(line)
        recording.recorder.on_stored()
    recording.stop()
    assert decoded == [len(line)] * 8


@pytest.mark.parametrize("names", [1, 40])
async def test_a_line_that_is_long_for_its_names_is_recorded_as_it_is(tmp_path: Path, names: int) -> None:
    recording = Recording(tmp_path, as_lines=True)
    line = json.dumps(
        {"command": "request", "payload": {"resources": [f"exclusive:{number:0400}" for number in range(names)]}},
        separators=(",", ":"),
    ).encode()
    recording.recorder.begin_turn(0, None).append(line)
    recording.recorder.on_stored()
    recording.stop()
    (segment,) = list_segments(tmp_path)
    assert line in segment.path.read_bytes().splitlines()
