"""Short runs of the fuzzer of the parsers, and the inputs that revealed a defect before."""

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
def test_every_property_holds_for_every_example_and_edge_case(check: object) -> None:
    assert callable(check)
    lines = examples()
    assert len(lines) > 100
    for line in lines:
        assert check(line)


def test_a_deeply_nested_message_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|depth limit exceeded"):
        messages.read(b'{"command":"pong","payload":' + b"[" * 2000 + b"]" * 2000 + b"}")


@pytest.mark.parametrize("options", [(), ("--plain",)])
def test_guided_and_random_inputs_reveal_no_defect(options: tuple[str, ...]) -> None:
    """Without atheris both are random."""
    completed = run("--seed", "7", "--runs", "10000", *options)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert "codec: 10000 inputs" in completed.stdout


def addresses_can_be_fixed() -> bool:
    """Return whether this system permits to disable the randomization of addresses."""
    probe = "import ctypes, sys; sys.exit(ctypes.CDLL(None).personality(0x40000) == -1)"
    return sys.platform == "linux" and subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.skipif(not addresses_can_be_fixed(), reason="libFuzzer depends on addresses, which are random here")
def test_a_seed_gives_the_same_inputs_in_every_process() -> None:
    first, second = (run("--seed", "5", "--runs", "10000").stdout.splitlines()[2:] for _ in range(2))
    assert first == second
    assert any("command Request" in line for line in first)


def test_a_printed_input_can_be_checked_again() -> None:
    completed = run("--input", "AHsiY29tbWFuZCI6InBpbmcifQ==")
    assert completed.returncode == 0
    assert "command Ping" in completed.stdout
