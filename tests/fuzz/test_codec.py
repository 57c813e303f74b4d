"""The readers of the protocol, a short while; and what has shown something before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.corpus import examples
from fuzz.properties import PROPERTIES
from genie.protocol import messages

TESTS = Path(__file__).resolve().parents[1]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.run(
        [sys.executable, "-m", "fuzz.codec", *options],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("check", dict.fromkeys(PROPERTIES))
def test_every_example_and_every_line_that_was_ever_read_wrong(check: object) -> None:
    assert callable(check)
    lines = examples()
    assert len(lines) > 100
    for line in lines:
        assert check(line)


def test_a_message_nested_deep_is_refused_like_any_other_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|depth limit exceeded"):
        messages.read(b'{"command":"pong","payload":' + b"[" * 2000 + b"]" * 2000 + b"}")


@pytest.mark.parametrize("options", [(), ("--plain",)])
def test_bytes_that_are_led_or_come_by_chance(options: tuple[str, ...]) -> None:
    """Where there is no atheris both come by chance."""
    ran = run("--seed", "7", "--runs", "10000", *options)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "codec: 10000 inputs" in ran.stdout


def test_one_input_can_be_repeated() -> None:
    ran = run("--input", "AHsiY29tbWFuZCI6InBpbmcifQ==")
    assert ran.returncode == 0
    assert "command Ping" in ran.stdout
