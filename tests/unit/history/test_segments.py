"""The archiver: what happens when it is killed, when the disk is full, and with files that are not as they should be."""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from genie.core import LockManager
from genie.history import archiver
from genie.history.archiver import archive_complete, clean_up, delete_expired
from genie.history.records import Carried, OtherFormat, RawDecoder, UnreadableHistory
from genie.history.replay import Replay
from genie.history.retention import Retention
from genie.history.search import Query, search
from genie.history.segments import list_segments, recorded_terms
from support.core.history_recording import T0, Recording

DAY_S = 86_400.0


def ended(directory: Path) -> dict[int, float | None]:
    return {entry.id: entry.ended_at for entry in search(directory, Query()).requests}


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"archiver.lock"}


def record_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, float | None]:
    """Record two files of one leadership, with a request that is held from the first into the second. Return when they ended."""
    with monkeypatch.context() as patch:
        patch.setattr("genie.history.retention.SEGMENT_BYTES", 1)
        recording = Recording(directory)
        held = recording.request(0, "a")
        recording.recorder.flush()
        recording.release(10, held)
        recording.release(11, recording.request(11, "b"))
        recording.stop()
    return {held.id: T0 + 10, held.id + 1: T0 + 11}


async def test_an_archiver_that_is_killed_at_any_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = [(Path, "rename"), (Path, "unlink"), (archiver, "_write_durably"), (archiver, "_sync_directory")]

    def killed_at(count: int, function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == count:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return run

    for count in range(1, 20):
        directory = tmp_path / str(count)
        expected = record_files(directory, monkeypatch)
        calls: list[int] = []
        with monkeypatch.context() as patch:
            for owner, name in moments:
                patch.setattr(owner, name, killed_at(count, getattr(owner, name), calls))
            try:
                archive_complete(directory)
            except KeyboardInterrupt:
                pass
            else:
                break
        assert ended(directory) == expected
        archive_complete(directory)
        assert ended(directory) == expected
        delete_expired(directory, 40_000 * DAY_S, (time.time() + 41_000 * DAY_S) * 1000)
        kept = {name.partition(".jsonl")[0].removesuffix(".index") for name in names_in(directory)}
        assert len(kept) * 2 == len(names_in(directory))
    assert count > 10


async def test_a_file_that_is_completed_while_the_archiver_lists_hands_its_requests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_files(tmp_path, monkeypatch)
    second = list_segments(tmp_path)[1].path
    third = list_segments(tmp_path)[2].path
    hidden = [path.rename(path.with_suffix(".hidden")) for path in (second, third)]
    is_written = archiver.is_written

    def begin_the_next(path: Path) -> bool:
        for each in hidden:
            if each.exists():
                each.rename(each.with_suffix(".jsonl"))
        return is_written(path)

    monkeypatch.setattr(archiver, "is_written", begin_the_next)
    archive_complete(tmp_path)
    lines = chain.from_iterable(list_segments(tmp_path)[1].read())
    assert [line.id for line in lines if isinstance(line, Carried)] == [1]


async def test_a_clock_that_is_set_back_does_not_change_the_order_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = record_files(tmp_path, monkeypatch)
    numbers = [(segment.term, segment.number) for segment in list_segments(tmp_path)]
    second = list_segments(tmp_path)[1].path
    second.rename(second.with_name(f"20010101T000000.000000Z-{second.name.partition('Z-')[2]}"))
    assert [(segment.term, segment.number) for segment in list_segments(tmp_path)] == numbers
    archive_complete(tmp_path)
    assert ended(tmp_path) == expected


async def test_the_locks_of_the_files_work_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        """Lock as NFS does: an exclusive lock needs a file that is open for writing."""
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    recording = Recording(tmp_path)
    recording.stop()
    clean_up(tmp_path, Retention(max_age_s=40_000 * DAY_S))
    assert [segment.is_archived for segment in list_segments(tmp_path)] == [True]


async def test_expired_files_are_deleted_although_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_files(tmp_path, monkeypatch)
    archive_complete(tmp_path)
    recording = Recording(tmp_path)
    recording.stop()

    def fail(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archiver, "archive", fail)
    with pytest.raises(OSError, match="No space left"):
        clean_up(tmp_path, Retention(max_age_s=0))
    assert [segment.is_archived for segment in list_segments(tmp_path)] == [False]


async def test_only_one_process_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_files(tmp_path, monkeypatch)
    archive_complete(tmp_path)
    with (tmp_path / "archiver.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clean_up(tmp_path, Retention(1, 0))
    assert len(list_segments(tmp_path)) == 3
    clean_up(tmp_path, Retention(1, 0))
    assert list_segments(tmp_path) == []


async def test_a_damaged_or_missing_index_does_not_end_the_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_files(tmp_path, monkeypatch)
    archive_complete(tmp_path)
    first, second, _third = list_segments(tmp_path)
    (tmp_path / (first.stem + ".index")).unlink()
    (tmp_path / (second.stem + ".index")).write_bytes(b"nonsense")
    delete_expired(tmp_path, DAY_S, (time.time() + DAY_S / 2) * 1000)
    assert len(list_segments(tmp_path)) == 3
    delete_expired(tmp_path, DAY_S, (time.time() + 2 * DAY_S) * 1000)
    assert names_in(tmp_path) == set()


async def test_an_index_of_another_version_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_files(tmp_path, monkeypatch)
    archive_complete(tmp_path)
    (segment, *_) = list_segments(tmp_path)
    path = tmp_path / (segment.stem + ".index")
    content = path.read_bytes()[:-4] + bytes(4)  # a longer entry, with the right check sum
    path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))
    with pytest.raises(OtherFormat, match="another version of Genie has written this index"):
        _ = segment.header


async def test_what_is_left_by_killed_processes_expires(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.stop()
    stem = "20000101T000000.000000Z-00000000-000001"
    left = [f"{stem}{suffix}" for suffix in (".jsonl.damaged", ".jsonl.part", ".jsonl.gz.part", ".state", ".index")]
    left.append("20000101T000000.000000Z-00000000-000002.jsonl")
    for name in left:
        (tmp_path / name).write_text('{"event":"of another version","at":1}\n')
        os.utime(tmp_path / name, (time.time() - 2 * DAY_S,) * 2)
    young, foreign = f"{stem}.index.part", "export-2026.jsonl"
    (tmp_path / young).write_text("")
    (tmp_path / foreign).write_text("")
    os.utime(tmp_path / foreign, (0, 0))
    clean_up(tmp_path, Retention(max_age_s=DAY_S))
    assert not names_in(tmp_path) & set(left)
    assert {young, foreign} < names_in(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"promoted","at":1}',
        '{"command":"request","payload":{"resources":["exclusive:a"],"colour":"red"}}',
        '{"command":"transfer","payload":{"id":1}}',
        '{"command":"extend","payload":{"id":1,"transactionTimeout":5}}',
    ],
)
async def test_a_file_of_another_version_is_left_to_that_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    record_files(tmp_path, monkeypatch)
    other = tmp_path / "20990101T000000.000000Z-00000000-000001.jsonl"
    other.write_text(f'{{"event":"commands","at":1,"next_id":1,"next_fence":1}}\n{line}\n')
    clean_up(tmp_path, Retention(max_age_s=40_000 * DAY_S))
    assert [segment.is_archived for segment in list_segments(tmp_path)] == [True, True, True, False]
    assert other.exists()
    assert "another version" in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"command":"release","payload":{"id":1}}', '{"command":"release",'])
def test_commands_that_are_damaged_or_have_no_time_are_rejected(line: str) -> None:
    with pytest.raises(UnreadableHistory, match="damaged"):
        RawDecoder().decode(f"{line}\n".encode())


async def test_a_file_that_is_archived_while_it_is_read_is_read_from_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_files(tmp_path, monkeypatch)
    (lines,) = recorded_terms(tmp_path, 0, 1e18)
    archive_complete(tmp_path)
    replay = Replay()
    replay.run(lines)
    assert (replay.grants, replay.ends) == (2, 2)


async def test_the_requests_carried_into_a_file_that_is_archived_while_it_is_read_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_files(tmp_path, monkeypatch)
    first, second, _ = list_segments(tmp_path)
    archiver.archive(first, second, archiver.Room(tmp_path, Retention()))
    blocks = second.read()
    lines = next(blocks)
    archive_complete(tmp_path)
    lines += chain.from_iterable(blocks)
    assert len([line for line in lines if isinstance(line, Carried)]) == 1
    assert len(lines) == len([*chain.from_iterable(list_segments(tmp_path)[1].read())])


async def test_a_replay_begins_with_a_file_whose_first_requests_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 1)
    begins = time.time() * 1000
    recording = Recording(tmp_path, manager=LockManager(unix_offset_ms=begins))
    held = recording.request(0, "a")
    recording.request(1, "a")
    recording.recorder.flush()
    recording.recorder.flush()
    recording.release(10_000, held)
    recording.stop()
    assert len(list_segments(tmp_path)) == 3
    (lines,) = recorded_terms(tmp_path, begins + 5_000, 1e18)  # after all files have begun
    replay = Replay()
    replay.run(lines)
    assert (replay.grants, replay.ends) == (2, 1)


async def test_requests_whose_ends_are_missing_are_not_carried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 1)
    recording = Recording(tmp_path)
    ended = [recording.request(now, f"lost/{now}") for now in range(3)]
    long = recording.request(4, "long", transaction_timeout_ms=1e9)
    recording.recorder.flush()
    recording.drop_write(5)  # the releases of `ended`
    for now in (1_000, 3_000_000, 4_000_000):
        recording.request(now, f"other/{now}", transaction_timeout_ms=1e9)
        recording.recorder.flush()
    recording.stop()
    archive_complete(tmp_path)
    carried = [
        {line.id for line in chain.from_iterable(segment.read()) if isinstance(line, Carried)}
        for segment in list_segments(tmp_path)
    ]
    assert carried[3] == {*(request.id for request in ended), long.id, long.id + 1, long.id + 2}
    assert carried[4] == {long.id, long.id + 1, long.id + 2, long.id + 3}


def put_fifos_and_folders(directory: Path) -> str:
    """Put FIFOs and a folder in the places of files. Return the stem of the first recorded file."""
    stem = min(path.name for path in directory.glob("*.jsonl")).removesuffix(".jsonl")
    foreign = stem.replace("20", "19", 1)
    for name in (f"{foreign}.jsonl", f"{foreign}.index", f"{stem}.jsonl.gz.part", f"{stem}.index.part"):
        os.mkfifo(directory / name)
    (directory / f"{foreign}.jsonl.gz").mkdir()
    return stem


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


async def test_a_fifo_or_a_folder_in_the_place_of_a_file_stops_neither_the_archiver_nor_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = record_files(tmp_path, monkeypatch)
    stem = put_fifos_and_folders(tmp_path)
    assert clean_up(tmp_path, Retention(1 << 30, 1e12)) == 0
    assert ended(tmp_path) == expected
    assert f"{stem}.jsonl" not in names_in(tmp_path), "it is archived"
    put_fifo(tmp_path / f"{stem}.index")
    with pytest.raises(UnreadableHistory, match="has no index"):
        ended(tmp_path)
