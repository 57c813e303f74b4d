"""The history: what a server records is found again, whether its file is raw or archived."""

from __future__ import annotations

import fcntl
import gzip
import time
from datetime import datetime, tzinfo
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from genie.cli import main
from genie.cli.history import TimeType, read_window
from genie.core import Context, Disconnect, Expire, LockManager, Reason, Request
from genie.core.model import details_of
from genie.history import records
from genie.history.archiver import archive_complete, delete_expired, shrink
from genie.history.gantt import draw
from genie.history.records import UnreadableHistory, decode
from genie.history.redaction import Redaction, redaction_key
from genie.history.retention import RESERVED_BYTES, Retention
from genie.history.search import Query, search
from genie.history.segments import list_segments
from support.core.history_recording import T0, Recording
from support.processes.waiting import until


class Clock(datetime):
    """A day on which it is 14:05."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime(2026, 11, 24, 14, 5, tzinfo=tz)


def found(directory: Path, **query):
    return search(directory, Query(**query)).requests


@pytest.fixture(params=["raw", "archived"])
def finish(request, tmp_path):
    """End a recording, and leave its file raw or archive it."""

    def end(recording: Recording) -> None:
        recording.stop()
        if request.param == "archived":
            archive_complete(tmp_path)
        assert [segment.is_archived for segment in list_segments(tmp_path)] == [request.param == "archived"]

    return end


async def test_a_request_is_found_with_its_wait_and_its_hold(tmp_path, finish) -> None:
    recording = Recording(tmp_path)
    first = recording.request(0, "a", transaction="t1", note="the first")
    second = recording.request(10, "a", "b", principal="payments")
    recording.release(30, first)
    recording.release(45, second)
    recording.request(50, "other")
    finish(recording)
    one, two = found(tmp_path, resource="a")
    assert (one.id, one.transaction, one.note, one.asked_at, one.granted_at, one.ended_at) == (
        first.id, "t1", "the first", T0, T0, T0 + 30,
    )  # fmt: skip
    assert (two.asked_at, two.granted_at, two.ended_at, two.reason) == (T0 + 10, T0 + 30, T0 + 45, Reason.SUCCESS)
    assert [(waiter.id, waiter.transaction) for waiter in two.waited_for] == [(first.id, "t1")]
    assert (one.fence, two.fence) == (first.fence, second.fence)
    assert [entry.id for entry in found(tmp_path, transaction="t1")] == [first.id]
    assert [entry.id for entry in found(tmp_path, client="payments")] == [second.id]
    assert found(tmp_path, resource="nothing") == []


async def test_a_window_has_the_requests_that_waited_or_held_in_it(tmp_path, finish) -> None:
    recording = Recording(tmp_path)
    early = recording.request(0, "a")
    long = recording.request(5, "b")
    recording.release(10, early)
    late = recording.request(100, "c")
    recording.release(110, late)
    finish(recording)
    assert [entry.id for entry in found(tmp_path, since=T0 + 50, until=T0 + 60)] == [long.id]
    assert [entry.id for entry in found(tmp_path, since=T0 + 10, until=T0 + 100)] == [early.id, long.id, late.id]
    assert [entry.id for entry in found(tmp_path, limit=1)] == [late.id]
    assert search(tmp_path, Query(limit=1)).more


async def test_a_window_has_the_requests_of_earlier_blocks_and_files_that_are_held_in_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("genie.history.segments.BLOCK_BYTES", 200)
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 2_000)
    recording = Recording(tmp_path)
    long = recording.request(0, "long")
    held = [long]
    for now in range(1, 60):
        held.append(recording.request(now, f"short/{now}"))
        if now > 5:
            recording.release(now + 0.5, held[now - 5])
        recording.recorder.flush()
    recording.release(70, long)
    recording.stop()
    archive_complete(tmp_path)
    segments = list_segments(tmp_path)
    assert len(segments) > 3
    assert all(len(segment.header.blocks) > 3 for segment in segments[:-1])
    for now in range(10, 60):
        window = found(tmp_path, since=T0 + now + 0.2, until=T0 + now + 0.3)
        assert [entry.id for entry in window] == [long.id, *(held[each].id for each in range(now - 5, now + 1))]
    assert [entry.asked_at for entry in found(tmp_path, since=T0 + 65, resource="long")] == [T0]


async def test_every_end_has_its_reason(tmp_path, finish) -> None:
    recording = Recording(tmp_path)
    one = recording.request(0, "a", transaction="t1", transaction_timeout_ms=100)
    other = recording.request(1, "b", transaction="t2", transaction_timeout_ms=1_000)
    recording.request(2, "b", transaction="t1", queue_timeout_ms=50)
    victim = recording.request(3, "a", transaction="t2")
    recording.step(Expire(), 60)
    recording.step(Expire(), 100)
    other.release_on_disconnect = True
    recording.step(Disconnect([other]), 120)
    finish(recording)
    reasons = {entry.id: entry.reason for entry in found(tmp_path)}
    assert reasons == {
        one.id: Reason.TRANSACTION_TIMEOUT,
        other.id: Reason.DISCONNECTED,
        other.id + 1: Reason.QUEUE_TIMEOUT,
        victim.id: Reason.DEADLOCK,
    }
    assert next(entry.cycle for entry in found(tmp_path) if entry.id == victim.id) == ("t2", "t1")


async def test_what_is_not_stored_is_not_recorded(tmp_path) -> None:
    recording = Recording(tmp_path)
    stored = recording.request(0, "a")
    lost = Request((), ("b",))
    recording.recorder.on_events(recording.manager.step(lost, 1), 1.0)
    recording.stop()
    assert [entry.id for entry in found(tmp_path)] == [stored.id]


async def test_a_timer_leaves_lines_that_are_being_stored_to_the_next_commit(tmp_path) -> None:
    recording = Recording(tmp_path, as_lines=True)
    recorder, manager = recording.recorder, recording.manager
    one = recording.request(0, "a")
    being_stored = Request((), ("b",))
    manager.step(being_stored, 1)
    recorder.begin_turn(1, None).append(records.command_line(being_stored))
    recorder._on_timer()
    assert not recorder._joined  # what is stored may be written only with what continues from it
    assert recording.writer._queue.empty()
    recorder.on_stored()
    assert not recorder._lines
    three = recording.request(2, "c")  # the first one after a write
    recording.stop()
    assert [(entry.id, entry.granted_at) for entry in found(tmp_path)] == [
        (one.id, T0),
        (being_stored.id, T0 + 1),
        (three.id, T0 + 2),
    ]


async def test_a_written_mark_is_not_taken_for_the_last_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("genie.history.recorder.JOINED_LINES", 4)
    recording = Recording(tmp_path, as_lines=True)
    ids = [recording.request(now, f"a{now}").id for now in range(2)]  # the last mark is the third of four lines
    for now in range(2, 5):
        request = Request((), (f"a{now}",))
        recording.recorder.on_events(recording.manager.step(request, now), now)  # a line without a mark
        ids.append(request.id)
    recording.recorder.begin_turn(5, None)  # without a command
    ids.append(recording.request(6, "b").id)
    recording.stop()
    times = [T0 + now for now in (0, 1, 2, 3, 4, 6)]
    assert [(entry.id, entry.granted_at) for entry in found(tmp_path)] == list(zip(ids, times, strict=True))


async def test_requests_are_carried_into_the_next_file_of_a_leadership(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 1)
    recording = Recording(tmp_path)
    held = recording.request(0, "a", note="held for long")
    waiting = recording.request(1, "a")
    recording.recorder.flush()
    recording.request(2, "b")
    recording.recorder.flush()
    recording.release(3, held)
    recording.stop()
    segments = list_segments(tmp_path)
    assert len(segments) == 4  # one for each flush, and the empty one that follows the last
    archive_complete(tmp_path)
    segments = list_segments(tmp_path)
    assert all(segment.is_archived for segment in segments)
    last = [line for lines in segments[2].read() for line in lines]
    assert {line.id for line in last if isinstance(line, records.Carried)} == {held.id, waiting.id, waiting.id + 1}
    delete_expired(tmp_path, 1e9, T0)
    segments[0].path.unlink()
    segments[1].path.unlink()
    one, two = found(tmp_path, resource="a")
    assert (one.note, one.asked_at, one.granted_at, one.ended_at) == ("held for long", None, T0, T0 + 3)
    assert (two.asked_at, two.granted_at, two.ended_at) == (T0 + 1, T0 + 3, None)


async def test_a_new_leader_records_what_it_takes_over(tmp_path) -> None:
    manager = LockManager(unix_offset_ms=T0)
    held = Request((), ("a",), context=Context("payments"))
    manager.step(held, 5)
    recording = Recording(tmp_path, manager=manager)
    recording.release(20, held)
    recording.stop()
    (entry,) = found(tmp_path, resource="a")
    assert (entry.asked_at, entry.granted_at, entry.ended_at, entry.client) == (None, T0 + 5, T0 + 20, "payments")


async def test_redacted_names_stay_equal_and_lose_their_notes(tmp_path, finish) -> None:
    recording = Recording(tmp_path, redacted=("customers/",))
    first = recording.request(0, "customers/alice", note="alice's card", transaction="t")
    recording.request(1, "customers/alice")
    recording.request(2, "orders/7", note="seven")
    recording.release(3, first)
    finish(recording)
    one, two, three = found(tmp_path)
    assert one.exclusive == two.exclusive
    assert one.exclusive[0].startswith("customers/#")
    assert (one.note, one.transaction, three.note) == (None, "t", "seven")
    (segment,) = list_segments(tmp_path)
    content = gzip.decompress(segment.path.read_bytes()) if segment.is_archived else segment.path.read_bytes()
    assert b"alice" not in content
    assert segment.path.stat().st_mode & 0o077 == 0


async def test_units_and_subtrees_are_found_by_name_also_if_they_are_redacted(tmp_path, finish) -> None:
    recording = Recording(tmp_path)
    recording.recorder._redaction = Redaction(("secret/",), redaction_key(tmp_path))
    locks = [
        (["x/**"], {}),
        (["secret/**"], {}),
        (["secret/a/**"], {}),
        (["x/1"], {"pool": (2, 3), "secret/pool": (1, 2)}),
        ([], {"pool": (1, 3)}),
    ]
    requests = [Request((), tuple(names), transaction=f"t{n}") for n, (names, _) in enumerate(locks)]
    for request, (_, units) in zip(requests, locks, strict=True):
        request.details = details_of((), request.exclusive, units)
        recording.step(request, 0)
    finish(recording)

    def find(resource: str) -> list[tuple[int, str | None]]:
        return [(requests.index(by_id[entry.id]), entry.mode) for entry in found(tmp_path, resource=resource)]

    by_id = {request.id: request for request in requests}
    assert find("pool") == [(3, "units"), (4, "units")]
    assert find("x/1") == [(0, "exclusive"), (3, "exclusive")]
    assert find("x/**") == [(0, "exclusive")]
    assert find("secret/pool") == [(1, "exclusive"), (3, "units")]
    assert find("secret/**") == [(1, "exclusive")]
    assert find("secret/a/b") == [(1, "exclusive"), (2, "exclusive")]
    assert found(tmp_path, transaction="t4")[0].locks == ["1/3:pool"]
    content = b"".join(
        gzip.decompress(segment.path.read_bytes()) if segment.is_archived else segment.path.read_bytes()
        for segment in list_segments(tmp_path)
    )
    assert b"secret/pool" not in content
    assert b"secret/a" not in content
    assert b'"secret/**"' in content


async def test_a_file_that_a_server_writes_is_searched_and_not_archived(tmp_path) -> None:
    recording = Recording(tmp_path)
    request = recording.request(0, "a")
    recording.recorder.flush()
    while not recording.writer._queue.empty() or recording.writer._queued_sizes:
        pass
    archive_complete(tmp_path)
    (segment,) = list_segments(tmp_path)
    assert not segment.is_archived
    with segment.path.open("ab") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(b'{"event":"released","at":1')  # a line that is being written
    assert [entry.id for entry in found(tmp_path, resource="a")] == [request.id]
    recording.stop()


async def test_old_files_are_deleted_by_age_and_by_size(tmp_path) -> None:
    for start in (0, 1_000, 2_000):
        recording = Recording(tmp_path, manager=LockManager(next_id=start + 1, unix_offset_ms=T0))
        recording.request(start, "a")
        recording.stop()
    archive_complete(tmp_path)
    delete_expired(tmp_path, max_age_s=5, now_ms=T0 + 5_500)
    assert [entry.granted_at for entry in found(tmp_path)] == [T0 + 1_000, T0 + 2_000]
    newest = list_segments(tmp_path)[-1]
    size = newest.path.stat().st_size + (tmp_path / f"{newest.stem}.index").stat().st_size
    shrink(tmp_path, Retention(max_bytes=(size + RESERVED_BYTES) * 4 // 3 + 1))
    assert [entry.granted_at for entry in found(tmp_path)] == [T0 + 2_000]
    assert {path.suffix for path in tmp_path.iterdir()} == {".gz", ".index", ".lock"}


async def test_a_slow_disk_costs_events_and_never_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("genie.history.writer.MAX_QUEUED_BYTES", -1)
    recording = Recording(tmp_path)
    recording.request(0, "a")
    recording.recorder.flush()
    assert recording.writer.dropped == 1
    monkeypatch.setattr("genie.history.writer.MAX_QUEUED_BYTES", 1 << 20)
    kept = recording.request(1, "b")
    recording.stop()
    result = search(tmp_path, Query())
    assert ([entry.id for entry in result.requests], result.gaps) == ([kept.id], 1)


async def test_an_error_of_the_disk_costs_events_and_nothing_else(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 1)
    recording = Recording(tmp_path)
    first = recording.request(0, "a")
    await until(lambda: list_segments(tmp_path))

    def fail(_snapshot_bytes: int = 0) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording.writer, "_create_next_file", fail)
    recording.recorder.flush()
    await until(lambda: recording.writer._has_failed)
    recording.request(1, "b")
    recording.recorder.stop()
    recording.writer.join(10)
    assert recording.writer.dropped == 1
    assert [entry.id for entry in found(tmp_path)] == [first.id]


async def test_nothing_waits_for_a_disk_that_has_failed(tmp_path) -> None:
    manager = LockManager(unix_offset_ms=T0)
    manager.step(Request((), ("a",)), 5)
    directory = tmp_path / "main"
    directory.write_text("not a directory")
    recording = Recording(directory, manager=manager)
    await until(lambda: recording.writer.dropped == 1)
    recording.request(6, "b")
    recording.recorder.flush()
    await until(lambda: recording.writer.dropped == 2)
    assert not recording.writer._queued_sizes
    assert recording.writer._queue.empty()
    recording.recorder.stop()
    recording.writer.join(10)


async def test_a_damaged_file_does_not_keep_others_from_being_archived(tmp_path, capsys) -> None:
    recording = Recording(tmp_path)
    request = recording.request(0, "a")
    recording.stop()
    damaged = tmp_path / "20000101T000000.000000Z-00000000-000001.jsonl"
    damaged.write_text("{nonsense\n")
    with pytest.raises(UnreadableHistory, match=r"000001\.jsonl: damaged"):
        found(tmp_path)
    archive_complete(tmp_path)
    assert [entry.id for entry in found(tmp_path)] == [request.id]
    assert damaged.with_name(f"{damaged.name}.damaged").read_text() == "{nonsense\n"
    assert "it is kept as" in capsys.readouterr().err
    (segment,) = list_segments(tmp_path)
    segment.path.write_bytes(segment.path.read_bytes()[:-4] + b"zzzz")
    with pytest.raises(UnreadableHistory, match=r"jsonl\.gz"):
        found(tmp_path)


def test_a_window_may_end_later_today_or_after_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.cli.history.datetime", Clock)
    since, until = TimeType(), TimeType()
    for begin, end, expected in (
        ("14:00", "14:10", 10),  # at 14:05
        ("23:50", "00:10", 20),
        ("14:00", "14:04", 4),
        ("14:10", "14:20", 10),  # yesterday
    ):
        window = read_window(since.convert(begin, None, None), until.convert(end, None, None))
        assert window[1] - window[0] == expected * 60_000
    with pytest.raises(click.UsageError, match="must not be later"):
        read_window(2.0, 1.0)


@pytest.mark.parametrize("text", ["0001-01-01", "9999-12-31T23:59", "yesterday", "25:00", "999999d", "9" * 400 + "s"])
def test_a_time_that_does_not_exist_is_rejected(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo" if text.startswith("0") else "America/New_York")
    time.tzset()
    try:
        with pytest.raises(click.BadParameter, match="is not a time"):
            TimeType().convert(text, None, None)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_another_format_is_rejected() -> None:
    with pytest.raises(UnreadableHistory, match="another version"):
        decode(b'{"event":"released","at":1,"id":2,"colour":"red"}\n')
    with pytest.raises(UnreadableHistory, match="damaged"):
        decode(b"{nonsense\n")


async def test_the_command_prints_a_table_json_and_a_chart(tmp_path) -> None:
    recording = Recording(tmp_path / "main")
    first = recording.request(0, "accounts/42", transaction="transfer-1")
    recording.request(10, "accounts/42", transaction="<transfer-2>", queue_timeout_ms=0)
    recording.release(30, first)
    recording.stop()
    command = ["history", "accounts/42", "--history-dir", str(tmp_path), "--namespace", "main"]
    chart = tmp_path / "chart.svg"
    text = CliRunner().invoke(main, [*command, "--svg", str(chart)])
    assert text.exit_code == 0, text.output
    assert "transfer-1" in text.output
    assert "queue-timeout" in text.output
    assert "&lt;transfer-2&gt;" in chart.read_text()
    assert chart.read_text() == draw(found(tmp_path / "main", resource="accounts/42"), None, T0 + 30)
    as_json = CliRunner().invoke(main, [*command, "--json"])
    assert f'"id":{first.id}' in as_json.output
    wrong = CliRunner().invoke(main, [*command, "--since", "yesterday"])
    assert wrong.exit_code != 0
    assert "is not a time" in wrong.output
