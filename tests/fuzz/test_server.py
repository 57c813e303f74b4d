"""A short run of the server fuzzer, and tests that its client model detects violations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fuzz.client_model import ClientModel
from fuzz.harness import Harness
from fuzz.shared_model import SharedModel, Violation
from genie.testing.simulation.loop import SimLoop, deterministic
from support.processes.servers import WAIT_S

TESTS = Path(__file__).resolve().parents[1]


def run(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.run(
        [sys.executable, "-m", f"fuzz.{module}", *options],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_scenarios_reveal_no_violation() -> None:
    completed = run("server", "--seed", "1", "--scenarios", "30")
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    assert "in 30 scenarios" in completed.stdout


@pytest.mark.parametrize("seed", [541210465, 550288840, 1227984111, 2076290585])
def test_a_scenario_that_failed_before_passes(seed: int) -> None:
    completed = run("server", "--seed", str(seed), "--scenarios", "1")
    assert completed.returncode == 0, completed.stdout


def test_a_seed_gives_the_same_scenario_in_every_process() -> None:
    first, second = (run("server", "--seed", "77", "--scenarios", "3").stdout.splitlines()[2:] for _ in range(2))
    assert first == second
    assert any("received released" in line for line in first)


def test_a_settled_server_has_ended_each_request_whose_deadline_has_passed() -> None:
    loop = SimLoop()

    async def scenario() -> float:
        harness = Harness(Counter())
        await harness.begin(False, {})
        await harness.wait(0.3)
        line = b'{"command":"request","payload":{"resources":["exclusive:a"],"transactionTimeout":10}}\n'
        await harness.send(0, line, ())
        await harness.settle()
        deadline = harness.pipeline.manager.deadlines.next
        await harness.wait(deadline + 0.1 - harness.now_ms)  # the timer fires 0.2 ms later
        assert harness.pipeline.manager.table.held
        await harness.settle()
        return len(harness.pipeline.manager.table.held)

    with deterministic(loop, seed=0):
        try:
            assert loop.run_until_complete(scenario()) == 0
        finally:
            loop.finish()


@pytest.mark.server
def test_lines_over_sockets_reveal_no_violation() -> None:
    completed = run("wire", "--seed", "3", "--lines", "1600")
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    assert "1600 lines over sockets" in completed.stdout


QUEUED = b'{"command":"queued","payload":{"id":101}}\n'
LOCKED = b'{"command":"locked","payload":{"id":101,"fence":9}}\n'
SUCCESS = b'{"command":"released","payload":{"id":101,"reason":"success"}}\n'


@pytest.mark.parametrize(
    ("received", "why"),
    [
        (LOCKED, "no request fits"),
        (QUEUED + LOCKED + LOCKED, "locked twice"),
        (QUEUED + QUEUED, "no reply to the pending command"),
        (QUEUED + LOCKED + SUCCESS, "more replies than releases"),
        (QUEUED + b'{"command":"pong","payload":{}}\n', "no reply to the pending command"),
        (QUEUED + b'{"command":"error","payload":{"code":"bad-json","message":""}}\n', "no command is pending"),
        (QUEUED + LOCKED.replace(b"9", b'9,"ref":"r"'), "has another ref"),
        (QUEUED.replace(b"101", b'101,"ref":"r"'), "no reply to the pending command"),
        (QUEUED + b'{"command":"bye","payload":{}}\n', "no reply to the pending command"),
        (QUEUED + b'{"command":"lokked","payload":{}}\n', "unknown message"),
        (QUEUED[:-1], "an incomplete line"),
        (b'{"command":"error","payload":{"code":"unknown-id","message":"","id":1}}\n', "fits no pending command"),
    ],
)
def test_violations_are_detected(received: bytes, why: str) -> None:
    model = ClientModel(SharedModel(), Counter(), 1000)
    model.send(b'{"command":"request","payload":{"resources":["exclusive:a"]}}\n', 0)
    with pytest.raises(Violation, match=why):
        model.receive(received)


WELCOME = (
    b'{"command":"welcome","payload":{"protocol":1,"server":"genie/1","features":[],"pingInterval":2000,'
    b'"namespace":"genie","resumed":false,"quiet":true,"ref":"0"}}\n'
)
REF = b'"ref":"r"'
QUIET_LOCKED = LOCKED.replace(b"9", b"9," + REF)


def quiet_client() -> ClientModel:
    """Return the model of a quiet client that has sent a `request`."""
    model = ClientModel(SharedModel(), Counter(), 1000)
    model.send(b'{"command":"hello","payload":{"quiet":true,"ref":"0"}}\n', 0)
    model.receive(WELCOME)
    model.send(b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"r"}}\n', 0)
    return model


@pytest.mark.parametrize(
    ("received", "why"),
    [
        (QUEUED.replace(b"101", b"101," + REF), "sent to a quiet connection"),
        (LOCKED, "no request fits"),
        (QUIET_LOCKED + SUCCESS, "released has the ref None"),
        (QUIET_LOCKED + b'{"command":"pong","payload":{}}\n', "no reply to the pending command"),
        (QUIET_LOCKED.replace(b'"r"', b'"s"'), "no request fits"),
        (QUIET_LOCKED + QUIET_LOCKED.replace(b"101", b"102"), "no request fits"),
        (WELCOME, "welcome is sent twice"),
    ],
)
def test_violations_of_a_quiet_connection_are_detected(received: bytes, why: str) -> None:
    model = quiet_client()
    with pytest.raises(Violation, match=why):
        model.receive(received)


def test_a_repeated_request_gets_its_state() -> None:
    model, ask = (
        ClientModel(SharedModel(), Counter(), 1000),
        b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"r"}}\n',
    )
    model.send(ask + ask + b'{"command":"ping","payload":{}}\n', 0)
    model.receive(QUEUED.replace(b"101", b"101," + REF) + QUIET_LOCKED + QUEUED.replace(b"101", b"101," + REF))
    with pytest.raises(Violation, match="the state of 101"):
        model.receive(b'{"command":"pong","payload":{}}\n')


@pytest.mark.parametrize("was_received", [False, True])
def test_a_repeated_request_gets_its_end_if_another_client_had_received_this_end_before(was_received: bool) -> None:
    shared = SharedModel()
    model, other = ClientModel(shared, Counter(), 1000), ClientModel(shared, Counter(), 1000)
    ask = b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"r"}}\n'
    queued, ended = QUEUED.replace(b"101", b"101," + REF), SUCCESS.replace(b'"success"', b'"success",' + REF)
    pong = b'{"command":"pong","payload":{}}\n'
    model.send(ask, 0)
    model.receive(queued)
    other.send(b'{"command":"release","payload":{"id":101,"ref":"r"}}\n', 0)
    if was_received:
        other.receive(ended)
    model.send(ask + b'{"command":"ping","payload":{}}\n', 0)
    if was_received:
        with pytest.raises(Violation, match="the state of 101"):
            model.receive(queued + pong)
    else:
        other.receive(ended)
        model.receive(queued + pong + ended)


def test_a_ref_that_was_granted_makes_no_second_request() -> None:
    model, ask = (
        ClientModel(SharedModel(), Counter(), 1000),
        b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"r"}}\n',
    )
    model.send(ask + ask, 0)
    with pytest.raises(Violation, match="101 had this ref and was granted"):
        model.receive(QUEUED.replace(b"101", b"101," + REF) + QUIET_LOCKED + QUEUED.replace(b"101", b"102," + REF))


def test_a_quiet_client_accepts_locked_released_and_bye() -> None:
    model = quiet_client()
    model.send(b'{"command":"release","payload":{"ref":"r"}}\n{"command":"bye","payload":{"ref":"b"}}\n', 0)
    ended = SUCCESS.replace(b'"success"', b'"success",' + REF)
    model.receive(QUIET_LOCKED + ended + b'{"command":"bye","payload":{"ref":"b"}}\n')
    assert model.close_reason == "bye"
    assert not model.pending


@pytest.mark.parametrize("code", ["unavailable", "unknown-id"])
def test_after_a_rejected_hello_every_command_is_unavailable(code: str) -> None:
    model = ClientModel(SharedModel(), Counter(), 1000)
    model.send(b'{"command":"hello","payload":{"protocol":2}}\n{"command":"release","payload":{"id":7}}\n', 0)
    answer = b'{"command":"error","payload":{"code":"%b","message":""%b}}\n'
    model.receive(answer % (b"unsupported-protocol", b""))
    refusal = answer % (code.encode(), b',"id":7')
    if code == "unavailable":
        model.receive(refusal)
        assert not model.pending
    else:
        with pytest.raises(Violation, match="fits no pending command"):
            model.receive(refusal)
