"""Worlds of lines, a short while; and that what is wrong would be seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fuzz.client_model import Ear
from fuzz.shared_model import Book, Wrong
from servers import WAIT_S

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


def test_worlds_of_lines() -> None:
    ran = run("server", "--seed", "1", "--worlds", "30")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "in 30 worlds" in ran.stdout


@pytest.mark.parametrize("seed", [550288840])
def test_a_world_that_went_wrong_before(seed: int) -> None:
    ran = run("server", "--seed", str(seed), "--worlds", "1")
    assert ran.returncode == 0, ran.stdout


def test_a_seed_gives_the_same_world_in_every_process() -> None:
    first, second = (run("server", "--seed", "77", "--worlds", "3").stdout.splitlines()[2:] for _ in range(2))
    assert first == second
    assert any("told released" in line for line in first)


@pytest.mark.server
def test_lines_over_sockets() -> None:
    ran = run("wire", "--seed", "3", "--lines", "1600")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "1600 lines over sockets" in ran.stdout


QUEUED = b'{"command":"queued","payload":{"id":101}}\n'
LOCKED = b'{"command":"locked","payload":{"id":101,"fence":9}}\n'
SUCCESS = b'{"command":"released","payload":{"id":101,"reason":"success"}}\n'


@pytest.mark.parametrize(
    ("heard", "why"),
    [
        (LOCKED, "nobody has asked for it"),
        (QUEUED + LOCKED + LOCKED, "locked twice"),
        (QUEUED + QUEUED, "no answer to what is due"),
        (QUEUED + LOCKED + SUCCESS, "more answers than releases"),
        (QUEUED + b'{"command":"pong","payload":{}}\n', "no answer to what is due"),
        (QUEUED + b'{"command":"error","payload":{"code":"bad-json","message":""}}\n', "nothing is due"),
        (QUEUED + LOCKED.replace(b"9", b'9,"ref":"r"'), "has another ref"),
        (QUEUED.replace(b"101", b'101,"ref":"r"'), "no answer to what is due"),
        (QUEUED + b'{"command":"bye","payload":{}}\n', "no answer to what is due"),
        (QUEUED + b'{"command":"lokked","payload":{}}\n', "no message that anybody knows"),
        (QUEUED[:-1], "half a line"),
        (b'{"command":"error","payload":{"code":"unknown-id","message":"","id":1}}\n', "does not fit"),
    ],
)
def test_what_must_not_be_told_is_seen(heard: bytes, why: str) -> None:
    ear = Ear(Book(), Counter(), 1000)
    ear.says(b'{"command":"request","payload":{"resources":["exclusive:a"]}}\n', 0)
    with pytest.raises(Wrong, match=why):
        ear.hears(heard)


WELCOME = (
    b'{"command":"welcome","payload":{"protocol":1,"server":"genie/1","features":[],"pingInterval":2000,'
    b'"namespace":"genie","resumed":false,"quiet":true,"ref":"0"}}\n'
)
REF = b'"ref":"r"'
QUIET_LOCKED = LOCKED.replace(b"9", b"9," + REF)


def quiet_ear() -> Ear:
    """Of a client that has asked for no `queued`, and then for a lock, twice; it releases it by its ref and by its id."""
    ear = Ear(Book(), Counter(), 1000)
    ear.says(b'{"command":"hello","payload":{"quiet":true,"ref":"0"}}\n', 0)
    ear.hears(WELCOME)
    ear.says(b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"r"}}\n', 0)
    return ear


@pytest.mark.parametrize(
    ("heard", "why"),
    [
        (QUEUED.replace(b"101", b"101," + REF), "it is quiet"),
        (LOCKED, "nobody has asked for it"),
        (QUIET_LOCKED + SUCCESS, "another ref"),
        (QUIET_LOCKED + b'{"command":"pong","payload":{}}\n', "no answer to what is due"),
        (QUIET_LOCKED.replace(b'"r"', b'"s"'), "nobody has asked for it"),
        (QUIET_LOCKED + QUIET_LOCKED.replace(b"101", b"102"), "nobody has asked for it"),
        (WELCOME, "welcomed twice"),
    ],
)
def test_what_a_quiet_client_must_not_be_told_is_seen(heard: bytes, why: str) -> None:
    ear = quiet_ear()
    with pytest.raises(Wrong, match=why):
        ear.hears(heard)


def test_who_asks_again_must_be_told_how_it_stands() -> None:
    ear, ask = (
        Ear(Book(), Counter(), 1000),
        b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"r"}}\n',
    )
    ear.says(ask + ask + b'{"command":"ping","payload":{}}\n', 0)
    ear.hears(QUEUED.replace(b"101", b"101," + REF) + QUIET_LOCKED + QUEUED.replace(b"101", b"101," + REF))
    with pytest.raises(Wrong, match="how 101 stands"):
        ear.hears(b'{"command":"pong","payload":{}}\n')


def test_a_ref_that_was_granted_makes_no_second_request() -> None:
    ear, ask = (
        Ear(Book(), Counter(), 1000),
        b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"r"}}\n',
    )
    ear.says(ask + ask, 0)
    with pytest.raises(Wrong, match="101 had this ref, and was granted"):
        ear.hears(QUEUED.replace(b"101", b"101," + REF) + QUIET_LOCKED + QUEUED.replace(b"101", b"102," + REF))


def test_what_a_quiet_client_is_told() -> None:
    ear = quiet_ear()
    ear.says(b'{"command":"release","payload":{"ref":"r"}}\n{"command":"bye","payload":{"ref":"b"}}\n', 0)
    ended = SUCCESS.replace(b'"success"', b'"success",' + REF)
    ear.hears(QUIET_LOCKED + ended + b'{"command":"bye","payload":{"ref":"b"}}\n')
    assert ear.ends == "bye"
    assert not ear.due


@pytest.mark.parametrize("code", ["unavailable", "unknown-id"])
def test_behind_a_rejected_hello_everything_is_unavailable(code: str) -> None:
    ear = Ear(Book(), Counter(), 1000)
    ear.says(b'{"command":"hello","payload":{"protocol":2}}\n{"command":"release","payload":{"id":7}}\n', 0)
    answer = b'{"command":"error","payload":{"code":"%b","message":""%b}}\n'
    ear.hears(answer % (b"unsupported-protocol", b""))
    refusal = answer % (code.encode(), b',"id":7')
    if code == "unavailable":
        ear.hears(refusal)
        assert not ear.due
    else:
        with pytest.raises(Wrong, match="does not fit"):
            ear.hears(refusal)
