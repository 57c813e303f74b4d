"""The races of `genie run` that no outside event can hit on purpose, with a client that plays its part on cue."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import pytest

from genie.cli import run
from genie.cli.run import LockedCommand, RunOptions
from genie.errors import LockLost, QueueTimeout, Unavailable


class Hold:
    """`client.lock(…)`, with something that happens at the grant, and something at the release."""

    def __init__(self, granted: Callable[[Hold], None], released: Callable[[], None]) -> None:
        self.granted, self.released = granted, released
        self.lost = False
        self.left = False

    def lose(self) -> None:
        self.lost = True
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)

    async def __aenter__(self) -> Any:
        self.granted(self)
        return SimpleNamespace(id=1, fence=2)

    async def __aexit__(self, *_: object) -> None:
        self.left = True
        if self.lost:
            raise LockLost("lock 1 is gone", id=1)
        self.released()


class Client:
    def __init__(self, *holds: Hold) -> None:
        self.holds = list(holds)
        self.asked: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def lock(self, *_: str, **options: Any) -> Hold:
        self.asked.append(options)
        return self.holds.pop(0)


def nothing(_: object = None) -> None:
    pass


def give_up(_: object = None) -> None:
    raise QueueTimeout(id=1, waited=1.0)


def carry_out(monkeypatch: pytest.MonkeyPatch, client: Client, program: str, wait: float | None = None) -> int:
    monkeypatch.setattr(run, "connect", lambda *_, **__: client)
    order = RunOptions(
        command=(sys.executable, "-c", program),
        resources=("exclusive:a",),
        host="",
        port=1,
        namespace=None,
        wait=wait,
        hold=None,
        transaction=None,
        priority=0,
        conflict_status=3,
        kill_after=30,
    )
    return asyncio.run(LockedCommand(order).run())


@pytest.fixture
def mark(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


LEAVE_A_MARK = "import os; open(os.environ['MARK'], 'w').close()"


def test_a_lock_lost_between_grant_and_start_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, mark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert carry_out(monkeypatch, Client(Hold(Hold.lose, nothing)), LEAVE_A_MARK) == run.LOST
    assert not mark.exists()
    assert "was not started" in capsys.readouterr().err


def test_a_signal_between_grant_and_start_starts_nothing_and_gives_the_lock_back(
    monkeypatch: pytest.MonkeyPatch, mark: Any
) -> None:
    hold = Hold(lambda _: os.kill(os.getpid(), signal.SIGUSR1), nothing)
    assert carry_out(monkeypatch, Client(hold), LEAVE_A_MARK) == 128 + signal.SIGUSR1
    assert not mark.exists()
    assert hold.left


def test_a_signal_in_the_moment_of_the_start_reaches_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = run.subprocess.Popen
    started = []

    def start(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)  # is heard when the command has been started
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(run.subprocess, "Popen", start)
    status = carry_out(monkeypatch, Client(Hold(nothing, nothing)), "import signal; signal.pause()")
    (command,) = started
    command.kill()  # which changes nothing for one that has ended
    assert command.wait() == -signal.SIGUSR1
    assert status == 128 + signal.SIGUSR1


def test_a_loss_that_is_heard_together_with_the_end_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = Hold(nothing, nothing)
    reap = LockedCommand._reap

    def reap_and_lose(self: LockedCommand) -> None:
        reap(self)
        hold.lost = True
        assert self._task is not None
        self._task.cancel()

    monkeypatch.setattr(LockedCommand, "_reap", reap_and_lose)
    assert carry_out(monkeypatch, Client(hold), "") == run.LOST
    assert "had just ended" in capsys.readouterr().err


def test_a_release_that_fails_leaves_the_command_s_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise Unavailable("nobody there")

    assert carry_out(monkeypatch, Client(Hold(nothing, fail)), "raise SystemExit(7)") == 7
    assert "will time out: nobody there" in capsys.readouterr().err


def test_it_asks_again_when_the_wire_s_longest_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(Hold(give_up, nothing), Hold(nothing, nothing))
    assert carry_out(monkeypatch, client, "raise SystemExit(7)") == 7
    assert [options["queue_timeout"] for options in client.asked] == [2_147_483.647] * 2


def test_it_does_not_ask_again_when_its_own_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert carry_out(monkeypatch, Client(Hold(give_up, nothing)), LEAVE_A_MARK, wait=5) == 3
