"""Races of `genie run` that need exact timing, with a fake client."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from genie.cli import run
from genie.cli.run import LockedCommand, RunOptions
from genie.errors import LockLost, QueueTimeout, Unavailable


class FakeLock:
    """The result of `client.lock(…)`, with callbacks for the grant and the release."""

    def __init__(self, on_granted: Callable[[FakeLock], None], on_released: Callable[[], None]) -> None:
        self.on_granted, self.on_released = on_granted, on_released
        self.lost = False
        self.exited = False

    def lose(self) -> None:
        self.lost = True
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)

    async def __aenter__(self) -> Any:
        self.on_granted(self)
        return SimpleNamespace(id=1, fence=2, release=self.release)

    async def release(self) -> None:
        self.on_released()

    async def __aexit__(self, *_: object) -> None:
        self.exited = True
        if self.lost:
            raise LockLost("lock 1 is gone", id=1)


class FakeClient:
    def __init__(self, *locks: FakeLock) -> None:
        self.locks = list(locks)
        self.requested: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def lock(self, *_: str, **options: Any) -> FakeLock:
        self.requested.append(options)
        return self.locks.pop(0)


def do_nothing(_: object = None) -> None:
    pass


def time_out(_: object = None) -> None:
    raise QueueTimeout(id=1, waited=1.0)


def run_command(monkeypatch: pytest.MonkeyPatch, client: FakeClient, program: str, wait: float | None = None) -> int:
    monkeypatch.setattr(run, "Client", lambda *_: client)
    options = RunOptions(
        command=(sys.executable, "-c", program),
        resources=("exclusive:a",),
        host="127.0.0.1",
        port=1,
        namespace=None,
        queue_timeout=wait,
        max_hold=None,
        transaction=None,
        priority=0,
        conflict_status=3,
        kill_after=30,
    )
    return asyncio.run(LockedCommand(options).run())


@pytest.fixture
def created_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FILE", str(tmp_path / "created"))
    return tmp_path / "created"


CREATE_FILE = "import os; open(os.environ['FILE'], 'w').close()"


def test_a_lock_lost_before_the_start_prevents_the_start(
    monkeypatch: pytest.MonkeyPatch, created_file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, FakeClient(FakeLock(FakeLock.lose, do_nothing)), CREATE_FILE) == run.LOST
    assert not created_file.exists()
    assert "was not started" in capsys.readouterr().err


def test_a_signal_before_the_start_prevents_it_and_releases_the_lock(
    monkeypatch: pytest.MonkeyPatch, created_file: Any
) -> None:
    hold = FakeLock(lambda _: os.kill(os.getpid(), signal.SIGUSR1), do_nothing)
    assert run_command(monkeypatch, FakeClient(hold), CREATE_FILE) == 128 + signal.SIGUSR1
    assert not created_file.exists()
    assert hold.exited


def test_a_signal_during_the_start_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = run.subprocess.Popen
    started = []

    def start(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)  # handled after the command has been started
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(run.subprocess, "Popen", start)
    status = run_command(monkeypatch, FakeClient(FakeLock(do_nothing, do_nothing)), "import signal; signal.pause()")
    (command,) = started
    command.kill()  # no effect if it has ended
    assert command.wait() == -signal.SIGUSR1
    assert status == 128 + signal.SIGUSR1


def test_a_loss_at_the_same_time_as_the_end_counts_as_a_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = FakeLock(do_nothing, do_nothing)
    reap = LockedCommand._reap

    def reap_and_lose(self: LockedCommand) -> None:
        reap(self)
        hold.lost = True
        assert self._task is not None
        self._task.cancel()

    monkeypatch.setattr(LockedCommand, "_reap", reap_and_lose)
    assert run_command(monkeypatch, FakeClient(hold), "") == run.LOST
    assert "had just ended" in capsys.readouterr().err


def lose_after_start(monkeypatch: pytest.MonkeyPatch, hold: FakeLock) -> list[Any]:
    """Lose the lock as soon as the command is started. Returns a list, to which the process of the command is added."""
    started = []
    start = LockedCommand._start

    def start_and_lose(self: LockedCommand, lock: Any) -> bool:
        is_started = start(self, lock)
        started.append(self._child_process)
        hold.lose()
        return is_started

    monkeypatch.setattr(LockedCommand, "_start", start_and_lose)
    return started


def test_a_lost_lock_ends_the_command_although_the_reason_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = FakeLock(do_nothing, do_nothing)
    started = lose_after_start(monkeypatch, hold)
    with Path("/dev/full").open("w", encoding="utf-8") as full_disk:
        monkeypatch.setattr(sys, "stderr", full_disk)
        status = run_command(monkeypatch, FakeClient(hold), "import signal; signal.pause()")
        with suppress(OSError):
            full_disk.close()
    (command,) = started
    command.kill()  # no effect if it has ended
    assert command.wait() == -signal.SIGTERM
    assert status == run.LOST


def test_a_lost_lock_ends_the_command_before_the_reason_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = FakeLock(do_nothing, do_nothing)
    started = lose_after_start(monkeypatch, hold)
    statuses = []
    monkeypatch.setattr(run, "print_message", lambda _: statuses.append(started[0].poll()))
    assert run_command(monkeypatch, FakeClient(hold), "import signal; signal.pause()") == run.LOST
    assert statuses == [-signal.SIGTERM]


def test_a_failed_release_keeps_the_status_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise Unavailable("no connection")

    assert run_command(monkeypatch, FakeClient(FakeLock(do_nothing, fail)), "raise SystemExit(7)") == 7
    assert "will time out: no connection" in capsys.readouterr().err


def test_it_queues_again_after_the_maximum_queue_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(FakeLock(time_out, do_nothing), FakeLock(do_nothing, do_nothing))
    assert run_command(monkeypatch, client, "raise SystemExit(7)") == 7
    assert [options["queue_timeout"] for options in client.requested] == [timedelta(seconds=2_147_483.647)] * 2


def test_it_does_not_queue_again_after_its_own_queue_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(monkeypatch, FakeClient(FakeLock(time_out, do_nothing)), CREATE_FILE, wait=5) == 3
