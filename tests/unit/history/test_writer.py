"""The writer of the history: deleted and read-only directories, idle servers, and the key of redacted names."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from genie.core import LockManager, Request
from genie.history.archiver import archive_complete
from genie.history.recorder import History
from genie.history.redaction import redaction_key
from genie.history.retention import Retention
from genie.history.search import Query, search
from genie.history.segments import list_segments
from genie.history.writer import _RawFile, namespace_directory
from support.core.history_recording import PRINCIPALS, T0, Recording
from support.processes.waiting import until


def list_names(directory: Path, suffix: str) -> list[str]:
    return [path.name for path in directory.iterdir() if path.suffix == suffix]


def record_writes(directory: Path, count: int) -> None:
    """Record requests, each in a write of its own."""
    recording = Recording(directory)
    for now in range(count):
        recording.request(now, f"a/{now}")
        recording.recorder.flush()
    recording.stop()


async def test_a_directory_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "main"
    recording = Recording(directory)
    recording.request(0, "a")
    recording.recorder.flush()
    await until(lambda: len(search(directory, Query()).requests) == 1)
    shutil.rmtree(directory)
    kept = recording.request(1, "b")
    recording.stop()
    assert [entry.id for entry in search(directory, Query()).requests] == [kept.id]


async def test_a_file_with_events_is_complete_after_an_hour_without_further_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.history.writer.SEGMENT_S", 0.05)
    recording = Recording(tmp_path)
    recording.request(0, "a")
    recording.recorder.flush()
    await until(lambda: len(list_segments(tmp_path)) == 2)
    archive_complete(tmp_path)
    assert [segment.is_archived for segment in list_segments(tmp_path)] == [True, False]
    recording.stop()
    assert len(list_segments(tmp_path)) == 2  # a file without events is never complete


@pytest.mark.parametrize("redacted", [(), ("a",)])
async def test_turns_without_commands_leave_nothing(tmp_path: Path, redacted: tuple[str, ...]) -> None:
    recording = Recording(tmp_path, redacted, as_lines=True)
    recorder = recording.recorder
    for now in range(200):
        recorder.begin_turn(now, PRINCIPALS[("billing", "reports")[now % 2]])
        recorder.on_stored()
        if now % 7 == 0:
            recorder._on_timer()
    recording.stop()
    (segment,) = list_segments(tmp_path)
    assert segment.path.read_bytes().count(b"\n") == 1  # `opened`
    assert not recording.writer._queued_sizes


async def test_an_archiver_that_cannot_be_started_does_not_end_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the archiver of this test is the real one
    started: list[list[str]] = []

    def start(command: list[str], **_options: object) -> None:
        started.append(command)
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("genie.history.writer.ARCHIVER_RETRY_S", 0)
    record_writes(tmp_path, 2)
    assert len(search(tmp_path, Query()).requests) == 2
    assert len(started) == 2


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (1, 3)])
async def test_an_archiver_that_has_failed_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, starts: int
) -> None:
    monkeypatch.undo()
    started: list[list[str]] = []

    def start(command: list[str], **_options: object) -> subprocess.CompletedProcess[bytes]:
        started.append(command)
        process = subprocess.CompletedProcess[bytes](command, code)
        process.poll = lambda: code  # type: ignore[attr-defined]
        process.communicate = lambda: (b"", None)  # type: ignore[attr-defined]
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("genie.history.writer.ARCHIVER_RETRY_S", 0)
    record_writes(tmp_path, 3)
    assert len(started) == starts


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    directory = tmp_path / "main"
    directory.mkdir(mode=0o500)
    root = os.geteuid() == 0
    if root:
        for path in (tmp_path, *tmp_path.parents[:2]):
            path.chmod(0o755)
        os.seteuid(65534)  # root may write to every directory
    try:
        with pytest.raises(ValueError, match="cannot write to"):
            History(str(tmp_path), "main", "127.0.0.1:0", Retention(), ())
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("content", [b"", b"x" * 31])
def test_a_damaged_redaction_key_is_an_error(tmp_path: Path, content: bytes) -> None:
    assert redaction_key(tmp_path) == redaction_key(tmp_path)
    (tmp_path / "redaction.key").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        redaction_key(tmp_path)


@pytest.mark.parametrize("namespace", [".", "..", "a.b", "a:b", "..."])
def test_each_namespace_has_its_own_subdirectory(tmp_path: Path, namespace: str) -> None:
    directory = namespace_directory(tmp_path, namespace).resolve()
    assert directory.parent == tmp_path.resolve()


@pytest.mark.parametrize("failing", ["snapshot", "events", "first file"])
async def test_a_full_disk_leaves_a_gap_and_not_the_end_of_the_history(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.history.writer.DISK_RETRY_S", 0.05)
    write, is_full, failed = _RawFile.write, failing == "snapshot", list[bytes]()

    def write_if_room(file: _RawFile, lines: bytes) -> None:
        begins = failing == "first file" and b'"opened"' in lines and not failed
        if begins or (is_full and (failing != "snapshot" or b'"opened"' not in lines)):
            failed.append(lines)
            write(file, lines[: len(lines) // 2])
            raise OSError(28, "No space left on device")
        write(file, lines)

    manager = LockManager(unix_offset_ms=T0)
    before = manager.step(Request(exclusive=("before",)), 0)
    assert before
    monkeypatch.setattr(_RawFile, "write", write_if_room)
    recording = Recording(tmp_path, manager=manager)
    lost = None
    if failing == "events":
        recording.request(1, "kept")
        recording.recorder.flush()
        await until(lambda: not recording.writer._queued_sizes)
        is_full = True
        lost = recording.request(2, "lost")
        recording.recorder.flush()
    await until(lambda: len(failed) > 2 or (failing == "first file" and bool(failed)))
    is_full = False
    await until(lambda: not recording.writer._has_failed)
    last = recording.request(3, "after")
    recording.stop()
    archive_complete(tmp_path)
    found = search(tmp_path, Query())
    ids = [entry.id for entry in found.requests]
    assert last.id in ids
    assert lost is None or lost.id not in ids
    assert found.gaps > 0
    assert not list_names(tmp_path, ".part")
    assert not recording.writer._queued_sizes
