"""A search in many files: ends, arrivals and gaps in other files than the one that is asked for."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tracemalloc
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner
from msgspec import json

from genie.cli import main
from genie.core import Context, LockManager, Reason, Request
from genie.core.commands import Take
from genie.history import search as search_module
from genie.history.archiver import archive_complete
from genie.history.gantt import draw
from genie.history.records import UnreadableHistory
from genie.history.redaction import redaction_key
from genie.history.search import Entry, Query, Result, search
from genie.history.segments import list_segments
from support.core.history_recording import T0, Recording
from support.processes.waiting import until


def found(directory: Path, **query: object) -> list[Entry]:
    return search(directory, Query(**query)).requests  # type: ignore[arg-type]


def restarted(directory: Path, first_id: int) -> Recording:
    """Record a leadership that has no locks of the one before."""
    return Recording(directory, manager=LockManager(next_id=first_id, unix_offset_ms=T0))


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a file after each flush, with blocks of a few lines."""
    monkeypatch.setattr("genie.history.segments.BLOCK_BYTES", 300)
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 1)


@pytest.mark.parametrize("query", [{}, {"resource": "a"}, {"since": T0 + 1, "until": T0 + 100}])
async def test_a_leadership_without_locks_does_not_hide_the_earlier_ones(
    tmp_path: Path, query: dict[str, float]
) -> None:
    recording = Recording(tmp_path)
    request = recording.request(0, "a")
    recording.release(5, request)
    recording.stop()
    for first_id in (100, 200):
        restarted(tmp_path, first_id).stop()
    archive_complete(tmp_path)
    assert [entry.id for entry in found(tmp_path, **query)] == [request.id]


@pytest.mark.parametrize("archives", [False, True])
@pytest.mark.usefixtures("small_files")
async def test_a_request_in_a_window_has_its_grant_and_its_end_after_the_window(tmp_path: Path, archives: bool) -> None:
    recording = Recording(tmp_path)
    held = recording.request(0, "a")
    waiting = recording.request(5, "a")
    for now in range(20, 30):
        recording.request(now, f"other/{now}")
        recording.recorder.flush()
    recording.release(40, held)
    recording.recorder.flush()
    recording.release(50, waiting)
    recording.stop()
    if archives:
        archive_complete(tmp_path)
    for names in ({}, {"resource": "a"}):
        one, two = found(tmp_path, since=T0 + 1, until=T0 + 10, **names)
        assert (one.ended_at, one.reason) == (T0 + 40, Reason.SUCCESS)
        assert (two.granted_at, two.fence, two.ended_at) == (T0 + 40, waiting.fence, T0 + 50)


@pytest.mark.parametrize("archives", [False, True])
async def test_a_request_that_the_next_leader_does_not_have_is_not_held_for_ever(
    tmp_path: Path, archives: bool
) -> None:
    recording = Recording(tmp_path)
    lost = recording.request(0, "a")
    recording.release(7, recording.request(6, "b"))
    recording.stop()
    recording = restarted(tmp_path, 100)
    later = recording.request(50, "a")
    recording.recorder.flush()
    if archives:
        archive_complete(tmp_path)
    await until(lambda: len(found(tmp_path)) == 3)
    for query in ({}, {"resource": "a"}, {"until": T0 + 60}, {"until": T0 + 10, "resource": "a"}):
        first = next(entry for entry in found(tmp_path, **query) if entry.id == lost.id)
        assert (first.ended_at, first.record_ends_at) == (None, T0 + 7)
    assert [entry.id for entry in found(tmp_path, since=T0 + 8)] == [later.id]
    assert found(tmp_path, since=T0 + 8)[0].record_ends_at is None
    recording.stop()  # as after an error of the disk, or when another server leads
    assert found(tmp_path, since=T0 + 8)[0].record_ends_at == T0 + 50
    command = ["history", "a", "--history-dir", str(tmp_path.parent), "--namespace", tmp_path.name]
    lines = CliRunner().invoke(main, command).output.splitlines()
    assert "≥ 7 ms  not recorded" in lines[1]
    assert "≥ 0 ms  not recorded" in lines[2]


async def test_two_servers_without_a_store_may_record_at_the_same_time(tmp_path: Path) -> None:
    one, other = Recording(tmp_path), restarted(tmp_path, 100)
    for number, recording in enumerate((one, other)):
        recording.request(number, "a")
        recording.recorder.flush()
    await until(lambda: len(found(tmp_path)) == 2)
    assert [entry.record_ends_at for entry in found(tmp_path)] == [None, None]
    one.stop()
    other.stop()


@pytest.mark.usefixtures("small_files")
async def test_the_latest_requests_are_found_although_earlier_ones_are_held_longer(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    early = [recording.request(now, f"long/{now}") for now in range(3)]
    recording.recorder.flush()
    short = recording.request(10, "short")
    recording.release(11, short)
    recording.recorder.flush()
    latest = recording.request(20, "latest")
    recording.stop()
    archive_complete(tmp_path)
    result = search(tmp_path, Query(limit=2))
    assert ([entry.id for entry in result.requests], result.more) == ([short.id, latest.id], True)
    assert len(found(tmp_path, limit=10)) == len(early) + 2


@pytest.mark.usefixtures("small_files")
async def test_a_search_by_name_reports_missing_events(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    request = recording.request(0, "a")
    recording.recorder.flush()
    recording.drop_write(0.5)
    for now in range(1, 9):
        recording.request(now, f"other/{now}")
        recording.recorder.flush()
    recording.stop()
    archive_complete(tmp_path)
    result = search(tmp_path, Query(resource="a"))
    assert ([entry.id for entry in result.requests], result.gaps) == ([request.id], 1)
    assert search(tmp_path, Query(resource="a", until=T0)).gaps == 0


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("is_archived", [False, True])
async def test_missing_events_are_reported_for_the_whole_time_of_the_gap(tmp_path: Path, *, is_archived: bool) -> None:
    recording = Recording(tmp_path)
    recording.request(0, "a")
    recording.recorder.flush()
    recording.drop_write(10)
    recording.recorder.flush()
    recording.stop()  # until the end of the leadership
    if is_archived:
        archive_complete(tmp_path)
    gaps = {now: search(tmp_path, Query(since=T0 + now, until=T0 + now + 1)).gaps for now in (5, 10, 1_000)}
    assert gaps == {5: 0, 10: 1, 1_000: 1}


async def test_a_search_by_transaction_names_those_for_whom_it_waited(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.request(0, "a", transaction="t1", principal="payments")
    recording.request(1, "a", transaction="t2")
    recording.stop()
    archive_complete(tmp_path)
    (entry,) = found(tmp_path, transaction="t2")
    assert [(waiter.transaction, waiter.client) for waiter in entry.waited_for] == [("t1", "payments")]


async def test_a_search_does_not_keep_what_does_not_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 40_000)

    def peak_of_search(directory: Path, requests: int) -> int:
        recording = Recording(directory)
        for now in range(requests):  # both names are in every block, and in no request together
            recording.release(now, recording.request(now, "hot", principal="payments" if now % 2 else None))
            recording.release(now, recording.request(now, "cold", principal="reports"))
            if now % 100 == 99:
                recording.recorder.flush()
        recording.stop()
        archive_complete(directory)
        peaks = []
        for _ in range(2):  # the interpreter may grow its table of interned strings during one of them
            tracemalloc.start()
            assert found(directory, resource="hot", client="reports") == []
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return min(peaks)

    few, many = peak_of_search(tmp_path / "few", 1_000), peak_of_search(tmp_path / "many", 8_000)
    assert len(list_segments(tmp_path / "many")) > 5 * len(list_segments(tmp_path / "few"))
    assert many < 2 * few


async def test_a_damaged_archive_is_reported_and_never_believed(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.release(3, recording.request(0, "a"))
    recording.stop()
    archive_complete(tmp_path)
    (segment,) = list_segments(tmp_path)
    for path in (segment.path, tmp_path / f"{segment.stem}.index"):
        content = path.read_bytes()
        for position in range(len(content)):
            flipped = bytes([content[position] ^ 0x5A])
            for damaged in (content[:position], content[:position] + flipped + content[position + 1 :]):
                path.write_bytes(damaged)
                with contextlib.suppress(UnreadableHistory):
                    assert [entry.ended_at for entry in found(tmp_path, resource="a")] == [T0 + 3]
        path.write_bytes(content)
    (tmp_path / f"{segment.stem}.index").unlink()
    with pytest.raises(UnreadableHistory, match="has no index"):
        found(tmp_path, resource="a")


@pytest.mark.parametrize("archives", [False, True])
async def test_who_has_the_key_finds_redacted_names(tmp_path: Path, archives: bool) -> None:
    recording = Recording(tmp_path, redacted=("customers/", "t/"))
    recording.recorder._redaction._key = redaction_key(tmp_path)
    request = recording.request(0, "customers/alice", transaction="t/1")
    recording.request(1, "customers/bob")
    recording.stop()
    if archives:
        archive_complete(tmp_path)
    assert [entry.id for entry in found(tmp_path, resource="customers/alice")] == [request.id]
    assert [entry.id for entry in found(tmp_path, transaction="t/1")] == [request.id]
    assert found(tmp_path, resource="customers/") == []
    (tmp_path / "redaction.key").unlink()
    assert found(tmp_path, resource="customers/alice") == []


async def test_the_notes_of_requests_that_choose_are_not_recorded_if_names_are_redacted(tmp_path: Path) -> None:
    recording = Recording(tmp_path, redacted=("customers/",))
    choices = (("customers/alice", True), ("free", True))
    recording.step(Take(Request((), (), context=Context(note="alice's card", choice_digest="")), choices, (1, 1), 1), 0)
    recording.step(
        Take(Request((), (), context=Context(note="alice's card", choice_digest="")), choices[:1], (1,), 2), 1
    )
    recording.request(2, "free", note="kept")
    recording.stop()
    content = list_segments(tmp_path)[0].path.read_text()
    assert "alice" not in content
    assert "kept" in content


async def test_a_request_has_its_mode_for_the_resource(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.step(Request(("a",), ("b",)), 0)
    recording.step(Take(Request((), ()), (("a", True),), (1,), 1), 1)
    recording.stop()
    assert [entry.mode for name in "ab" for entry in found(tmp_path, resource=name)] == ["shared", "exclusive"]
    command = ["history", "--history-dir", str(tmp_path.parent), "--namespace", tmp_path.name]
    header, one, two = CliRunner().invoke(main, command).output.splitlines()
    assert "RESOURCES" in header
    assert " exclusive:b shared:a " in one
    assert " anyOf " in two


async def test_the_process_of_a_search_lists_a_few_names_and_has_none_in_its_arguments(tmp_path: Path) -> None:
    names = [f"a/{number}" for number in range(1_000)]
    recording = Recording(tmp_path)
    recording.request(0, *names)
    recording.stop()
    command = [sys.executable, "-m", "genie.history.search", str(tmp_path)]
    query = json.encode(Query(resource="a/777"))
    output = subprocess.run(command, input=query, capture_output=True, check=True).stdout  # noqa: ASYNC221
    (entry,) = json.decode(output, type=Result).requests
    assert (entry.resources_total, len(entry.exclusive), entry.exclusive[0]) == (1_000, 10, "a/777")


async def test_a_chart_is_well_formed_and_shows_the_window(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    request = recording.request(0, "a\uffff", transaction="</text><script>\u202e\ufffe&'\"]]>", note="<!--\x1b")
    recording.request(90_000, "b")
    recording.release(100_000, request)
    recording.stop()
    chart = draw(found(tmp_path), T0 + 95_000, T0 + 96_000)
    tree = ET.fromstring(chart)  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    assert tree.find(f".//{space}script") is None
    bars = list(tree.iterfind(f"./{space}g/{space}rect"))
    assert [(bar.get("class"), bar.get("x"), bar.get("width")) for bar in bars] == [("held", "260.0", "730.0")] * 2
    assert (tree.find(f"./{space}title").text or "").endswith("35.000 to 16:01:36.000 UTC")


def test_the_process_of_a_search_leaves_the_processor_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []
    monkeypatch.setattr("os.nice", steps.append)
    monkeypatch.setattr(search_module, "search", lambda *_: steps.append("search") or Result([], more=False))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.encode(Query()))))
    search_module.main([str(tmp_path)])
    assert steps == [search_module.NICENESS, "search"]
