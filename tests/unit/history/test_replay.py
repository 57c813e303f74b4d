"""Replay: recorded steps are repeated exactly, a wrong record is found, and changes have their effect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from genie.cli import main
from genie.core import (
    HELD,
    WAITING,
    Context,
    Continue,
    Disconnect,
    Event,
    Expire,
    Extend,
    LockManager,
    Release,
    Request,
    Take,
)
from genie.core.grant import MAX_CANDIDATES
from genie.core.model import details_of
from genie.history.archiver import archive_complete
from genie.history.records import Granted, Line, Locked, Opened, Queued, Released
from genie.history.replay import Change, Diverged, Replay, Step, what_if
from genie.history.segments import list_segments, recorded_terms
from support.core.history_recording import T0, Recording
from support.runs.searches import seeds


def lines_of(directory: Path) -> list[Line]:
    return list(chain.from_iterable(recorded_terms(directory, 0, 1e18)))


def run_randomly(recording: Recording, seed: int, steps: int, names: Sequence[str] = "abcdef") -> None:
    """Execute random commands of every kind on a few names, so that there are waits, deadlocks and rearrangements.

    Names other than subtrees are also requested as units, if there are subtrees among the names.
    """
    random = Random(seed)  # noqa: S311 - not a secret
    live: list[Request] = []
    now = 0.0
    for _ in range(steps):
        now += random.choice([0, 0.25, 1, 7.5])
        live = [request for request in live if recording.manager.table.find(request.id)]
        kind = random.random()
        if kind < 0.55 or not live:
            sample = random.sample(names, random.randint(1, 3))
            units = {}
            if len(names) > 6 and random.random() < 0.5:
                units = {name: (random.randint(1, 3), random.randint(3, 4)) for name in sample if name[-1] != "*"}
            shared, exclusive = [], []
            for name in (name for name in sample if name not in units):
                random.choice([shared, exclusive, exclusive]).append(name)
            request = Request(
                tuple(shared),
                tuple(exclusive),
                random.choice([0, 5, 50, 10_000]),
                random.choice([20, 200, 10_000]),
                random.choice([None, "t1", "t2", "t3"]),
                random.choice([0, 0, 1, -2.5]),
                release_on_disconnect=random.random() < 0.5,
                context=Context(
                    random.choice([None, None, "billing", "reports"]), random.choice([None, None, "nightly"])
                ),
            )
            request.details = details_of(request.shared, request.exclusive, units)
            recording.step(request, now)
            live.append(request)
        elif kind < 0.85:
            recording.step(Release(random.choice(live).id), now)
        elif kind < 0.9:
            recording.step(Extend(random.choice(live).id, 500), now)
        elif kind < 0.95:
            recording.step(Disconnect(random.sample(live, min(3, len(live)))), now)
        else:
            recording.step(Expire(random.choice([1, 1000])), now)


class FullLockManager(LockManager):
    """A lock manager whose wait queues have few entries."""

    def request(self, request: Request, now: float, max_queue_entries: float = 6) -> list[Event]:
        return super().request(request, now, max_queue_entries)


ALL_KINDS = ["a", "x/1", "x/2", "x/y/1", "x/y/2", "x/**", "x/y/**", "**"]
"""Names, and subtrees that contain some of them."""


@pytest.mark.soak
@pytest.mark.parametrize("names", ["abcdef", ALL_KINDS], ids=["names", "all kinds"])
@pytest.mark.parametrize("redacted", [(), ("a", "t", "x/y")], ids=["plain", "redacted"])
@seeds(7)
async def test_the_lines_of_commands_are_read_as_the_events_that_they_caused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, redacted: tuple[str, ...], names: Sequence[str]
) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 10_000)
    monkeypatch.setattr("genie.history.recorder.WRITTEN_BYTES", 2_000)
    recorded = []
    for as_lines in (True, False):
        directory = tmp_path / str(as_lines)
        manager = FullLockManager(unix_offset_ms=T0)
        recording = Recording(directory, redacted, manager, as_lines=as_lines)
        run_randomly(recording, seed, 500, names)
        recording.stop()
        assert len(list_segments(directory)) > 2
        recorded.append([line for line in lines_of(directory) if not isinstance(line, Opened)])
    assert recorded[0] == recorded[1]
    assert sum(isinstance(line, Granted) for line in recorded[0]) > 20


@pytest.mark.soak
@pytest.mark.parametrize("names", ["abcdef", ALL_KINDS], ids=["names", "all kinds"])
@pytest.mark.parametrize("redacted", [(), ("x/",)], ids=["plain", "redacted"])
@seeds(7)
async def test_random_steps_are_repeated_exactly(
    tmp_path: Path, seed: int, redacted: tuple[str, ...], names: Sequence[str]
) -> None:
    if redacted:
        names = [name for name in names if name != "x/y/**"]  # the redacted subtree contains no redacted name
    recording = Recording(tmp_path, redacted, as_lines=True)
    run_randomly(recording, seed, 400, names)
    recording.stop()
    lines = lines_of(tmp_path)
    replay = Replay()
    replay.run(lines)
    assert replay.grants == sum(isinstance(line, Locked | Granted) for line in lines) > 20
    assert replay.ends == sum(isinstance(line, Released) for line in lines) > 50
    assert dict(replay.manager.table.held).keys() == recording.manager.table.held.keys()
    assert dict(replay.manager.table.waiting).keys() == recording.manager.table.waiting.keys()


@pytest.mark.parametrize("names", ["abcdef", ALL_KINDS], ids=["names", "all kinds"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_replay_begins_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, names: Sequence[str]
) -> None:
    monkeypatch.setattr("genie.history.retention.SEGMENT_BYTES", 10_000)
    monkeypatch.setattr("genie.history.recorder.WRITTEN_BYTES", 2_000)
    recording = Recording(tmp_path, as_lines=True)
    run_randomly(recording, seed, 600, names)
    recording.stop()
    archive_complete(tmp_path)
    whole, segments = lines_of(tmp_path), list_segments(tmp_path)
    assert len(segments) > 3
    for segment in segments[: len(segments) // 2]:
        segment.path.unlink()
    replay = Replay()
    replay.run(lines_of(tmp_path))
    assert 0 < replay.grants < sum(isinstance(line, Locked | Granted) for line in whole)


async def test_grants_that_a_step_has_left_for_later_are_repeated(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    holder = recording.request(0, "a")
    for _ in range(MAX_CANDIDATES + 1):
        recording.step(Request(("a",), ()), 1)
    recording.step(Release(holder.id), 2)
    assert recording.manager.pending_grants
    recording.step(Continue(), 3)
    recording.stop()
    replay = Replay()
    replay.run(lines_of(tmp_path))
    assert replay.grants == MAX_CANDIDATES + 2


async def test_connections_that_end_at_the_same_time_are_repeated(tmp_path: Path) -> None:
    """The record does not say which requests ended together. The second connection waited for a subtree that is closed then."""
    recording = Recording(tmp_path)
    holder, _ = recording.request(0, "x/1"), recording.request(1, "x/2")
    close = Request((), ("x/**",))
    close.details = details_of((), ("x/**",), {})
    recording.step(close, 2)
    below = recording.request(3, "x/1")
    recording.step(Disconnect([holder]), 4)
    assert below.state is WAITING
    recording.step(Disconnect([close]), 4)
    assert below.state is HELD
    recording.stop()
    replay = Replay()
    replay.run(lines_of(tmp_path))
    assert (replay.grants, replay.ends) == (3, 2)


async def test_a_request_with_any_of_is_granted_beside_waiters_that_it_does_not_conflict_with(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.request(0, "a")
    recording.step(Request(("b",), ("a",)), 1)  # waits for `a`, and so is in the queue of `b`
    taken = Request()
    recording.step(Take(taken, [("a", True), ("b", False)], [1, 1], 1), 2)
    recording.step(Release(taken.id), 3)
    recording.stop()
    assert taken.shared == ("b",)
    replay = Replay()
    replay.run(lines_of(tmp_path))
    assert (replay.grants, replay.ends) == (2, 1)


async def test_a_record_that_the_lock_manager_would_not_write_is_found(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    run_randomly(recording, 1, 300)
    recording.stop()
    lines = lines_of(tmp_path)
    grants = [index for index, line in enumerate(lines) if isinstance(line, Locked)]
    with pytest.raises(Diverged):
        Replay().run(lines[: grants[3]] + lines[grants[3] + 1 :])  # a grant is missing
    queued = next(index for index, line in enumerate(lines) if type(line) is Queued)
    with pytest.raises(Diverged, match="recorded twice"):
        Replay().run([*lines[: queued + 1], lines[queued], *lines[queued + 1 :]])
    index = grants[4]
    wrong = Locked(lines[index].at, lines[index].id, lines[index].fence + 1)  # type: ignore[union-attr]
    with pytest.raises(Diverged):
        Replay().run([*lines[:index], wrong, *lines[index + 1 :]])


async def test_a_step_has_the_queues_and_the_reason(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    first = recording.request(0, "a", transaction="t1")
    recording.request(1, "a", transaction="t2")
    recording.request(2, "a", transaction="t3", priority=1)
    recording.release(3, first)
    recording.stop()
    steps: list[Step] = []
    Replay(on_step=steps.append).run(lines_of(tmp_path))
    assert steps[2].outcome[1:] == ["not granted: t1 holds exclusive:a"]
    assert steps[2].queues == {"a": (["[t1]", "t2"], ["[t1]", "t3", "t2"])}
    assert steps[3].queues == {"a": (["[t1]", "t3", "t2"], ["[t3]", "t2"])}
    text = CliRunner().invoke(
        main, ["replay", "a", "--history-dir", str(tmp_path.parent), "--namespace", tmp_path.name]
    )
    assert text.exit_code == 0, text.output
    assert "a: [t1] t2 → [t1] t3 t2" in text.output
    assert "2 grants and 1 ends are the same as recorded." in text.output


async def record_a_queue(directory: Path) -> None:
    """`slow` holds `a` from 0 to 100; `t2` gives up at 51 ms; the urgent `t3` overtakes `t4`, and each holds for 10 ms."""
    recording = Recording(directory)
    slow = recording.request(0, "a", transaction="slow")
    recording.request(1, "a", transaction="t2", queue_timeout_ms=50)
    urgent = recording.request(2, "a", transaction="t3", priority=5)
    patient = recording.request(3, "a", transaction="t4")
    recording.step(Expire(), 51)
    recording.release(100, slow)
    recording.release(110, urgent)
    recording.release(120, patient)
    recording.stop()


async def test_without_a_change_the_simulation_is_the_record(tmp_path: Path) -> None:
    await record_a_queue(tmp_path)
    recorded, simulated = what_if(lines_of(tmp_path), 0, None)
    assert recorded == simulated
    assert (recorded.requests, recorded.granted, recorded.ended) == (4, 3, {"queue-timeout": 1})


async def test_changes_have_their_effect(tmp_path: Path) -> None:
    await record_a_queue(tmp_path)
    lines = lines_of(tmp_path)
    ids = {line.transaction: line.id for line in lines if isinstance(line, Queued)}

    def waits(change: Change) -> dict[str | None, float]:
        outcome = what_if(lines, 0, change)[1]
        return {name: outcome.waits[id_] for name, id_ in ids.items() if id_ in outcome.waits}

    assert waits(Change(transaction="t3", priority=0)) == {"slow": 0, "t3": 98, "t4": 107}
    assert waits(Change(transaction="t[34]", priority=-1)) == {"slow": 0, "t3": 98, "t4": 107}
    assert waits(Change(queue_timeout_ms=1_000)) == {"slow": 0, "t3": 98, "t2": 109, "t4": 117}
    assert waits(Change(transaction="slow", remove=True)) == {"t2": 0, "t3": 9, "t4": 18}
    assert waits(Change(transaction="slow", transaction_timeout_ms=40)) == {"slow": 0, "t3": 38, "t2": 49, "t4": 57}
    command = ["replay", "--history-dir", str(tmp_path.parent), "--namespace", tmp_path.name]
    shown = CliRunner().invoke(main, [*command, "--what-if", "queue-timeout=1s", "--of", "transaction=t2"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.endswith("ended: queue-timeout         1        0\n")
    wrong = CliRunner().invoke(main, [*command, "--what-if", "colour=red"])
    assert "use priority=NUMBER" in wrong.output


async def test_changes_of_units_and_subtrees_have_their_effect(tmp_path: Path) -> None:
    """`job` waits for one of two units, `close` for the subtree below which they are, and `late` for a name below it."""
    recording = Recording(tmp_path)

    def request(now: float, transaction: str, *names: str, units: int = 0) -> Request:
        request = Request((), names, transaction=transaction)
        request.details = details_of((), names, {"x/pool": (units, 2)} if units else {})
        recording.step(request, now)
        return request

    holder = request(0, "holder", units=2)
    job = request(1, "job", units=1)
    close = request(2, "close", "x/**")
    late = request(3, "late", "x/1")
    for now, each in ((100, holder), (110, job), (120, close), (130, late)):
        recording.release(now, each)
    recording.stop()
    lines = lines_of(tmp_path)
    recorded, simulated = what_if(lines, 0, None)
    assert recorded == simulated

    def waits(change: Change) -> list[float | None]:
        outcome = what_if(lines, 0, change)[1]
        return [outcome.waits.get(each.id) for each in (holder, job, close, late)]

    assert waits(Change(transaction="none")) == [0, 99, 108, 117]
    assert waits(Change(transaction="holder", remove=True)) == [None, 0, 9, 18]
    assert waits(Change(transaction="job", remove=True)) == [0, None, 98, 107]
    assert waits(Change(transaction="close", remove=True)) == [0, 99, None, 0]
    assert waits(Change(transaction="late", priority=1)) == [0, 99, 108, 0]
    assert waits(Change(transaction="close", priority=1)) == [0, 109, 98, 107]


async def test_a_removed_request_that_was_held_before_the_period_grants_its_waiters(tmp_path: Path) -> None:
    manager = LockManager(unix_offset_ms=T0)
    slow = Request((), ("a",), transaction="slow")
    waiting = Request((), ("a",), transaction="t2")
    manager.step(slow, 0)
    manager.step(waiting, 1)
    recording = Recording(tmp_path, manager=manager)
    last = recording.request(10, "a", transaction="t3")
    for now, request in ((100, slow), (110, waiting), (120, last)):
        recording.release(now, request)
    recording.stop()
    assert what_if(lines_of(tmp_path), 0, None)[1].waits == {last.id: 100}
    assert what_if(lines_of(tmp_path), 0, Change(transaction="slow", remove=True))[1].waits == {last.id: 10}


async def test_a_later_leadership_does_not_change_what_was_before_it(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    early = recording.request(0, "a")
    recording.release(10, early)
    lost = recording.request(11, "b", transaction_timeout_ms=1e6)
    recording.stop()
    manager = LockManager(next_id=100, unix_offset_ms=T0)
    carried = Request((), ("a",))  # granted by a leader whose history is elsewhere
    manager.step(carried, 40)
    recording = Recording(tmp_path, manager=manager)
    waiting = recording.request(50, "a")
    again = recording.request(51, "b")  # the lock of `lost` was released when no event was recorded
    for now, request in ((60, carried), (70, waiting), (71, again)):
        recording.release(now, request)
    recording.stop()
    recorded, simulated = what_if(lines_of(tmp_path), 0, None)
    assert recorded.waits == simulated.waits == {early.id: 0, lost.id: 0, waiting.id: 10, again.id: 0}


async def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    await record_a_queue(tmp_path)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "genie.cli", "replay", "--history-dir", str(tmp_path.parent)]
    command += ["--namespace", tmp_path.name]
    shown = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)  # noqa: ASYNC221 - our own
    os.close(write)
    assert shown.stderr == b""


async def test_a_simulation_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await record_a_queue(tmp_path)
    command = ["replay", "--history-dir", str(tmp_path.parent), "--namespace", tmp_path.name, "--what-if", "removed"]
    assert CliRunner().invoke(main, command).exit_code == 0
    monkeypatch.setattr("genie.history.replay.MAX_SIMULATED", 3)
    shown = CliRunner().invoke(main, command)
    assert "more than 3 requests in this window: make it smaller" in shown.output


async def test_a_record_that_ends_in_the_middle_of_a_step_is_repeated(tmp_path: Path) -> None:
    await record_a_queue(tmp_path)
    (path,) = [segment.path for segment in list_segments(tmp_path)]
    content = path.read_bytes()
    cut = content.rindex(b'{"event":"locked"')
    path.write_bytes(content[: cut + 10])
    shown = CliRunner().invoke(main, ["replay", "--history-dir", str(tmp_path.parent), "--namespace", tmp_path.name])
    assert shown.exit_code == 0, shown.output
    assert "ends in the middle of a step" in shown.output
    assert "2 grants and 3 ends are the same as recorded." in shown.output


async def test_a_replay_that_differs_shows_the_steps_before_and_the_time(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.request(0, "a", transaction="t1")
    recording.recorder.flush()
    recording.drop_write(0.5)
    recording.request(1, "b")
    recording.stop()
    shown = CliRunner().invoke(main, ["replay", "--history-dir", str(tmp_path.parent), "--namespace", tmp_path.name])
    assert shown.exit_code == 1
    assert "request 1 of t1 for exclusive:a" in shown.output
    assert "events are missing here" in shown.output
    assert " at 20" in shown.output
    compared = CliRunner().invoke(
        main, ["replay", "--history-dir", str(tmp_path.parent), "--namespace", tmp_path.name, "--what-if", "removed"]
    )
    assert "Events are missing in 1 places" in compared.output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--what-if", "priority=nan"], "use priority=NUMBER"),
        (["--what-if", "priority=inf"], "use priority=NUMBER"),
        (["--what-if", "transaction-timeout=infs"], "use priority=NUMBER"),
        (["--what-if", "queue-timeout=1e300d"], "use priority=NUMBER"),
        (["--what-if", "priority=1", "--what-if", "priority=2"], "two values for the same field"),
        (["--what-if", "removed", "--of", "client=a", "--of", "client=b"], "two values for the same field"),
        (["a", "--what-if", "removed"], "--of resource=PATTERN"),
        (["--since", "2026-01-02", "--until", "2026-01-01"], "(2026-01-02 00:00:00.000) must not be later than"),
    ],
)
def test_nonsense_is_rejected(tmp_path: Path, arguments: list[str], error: str) -> None:
    shown = CliRunner().invoke(main, ["replay", *arguments, "--history-dir", str(tmp_path)])
    assert shown.exit_code == 2
    assert error in " ".join(shown.output.split())


def test_the_lock_manager_of_a_replay_is_the_real_one() -> None:
    assert type(Replay().manager) is LockManager
