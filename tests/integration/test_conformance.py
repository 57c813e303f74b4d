"""The conformance kit: both clients and the server pass all cases; a few mutants show that the cases detect defects."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import load
from conformance.client_rules import FIELDS
from conformance.mutants import CLIENT_MUTANTS, MUTANTS, SERVER_MUTANTS, detect
from support.processes.servers import Redis, running_server

ROOT = Path(__file__).parent.parent.parent
KIT = [sys.executable, "-m", "conformance"]
CREDENTIAL = "Zq3vTokenOfTheKit"

ADAPTERS = ["asyncio_client", "thread_client"]
DETECTED_QUICKLY = [
    "fractions are cut off",
    "deadlock is an unknown reason",
    "the namespace of a command is ignored",
    "pong lacks the ref",
]


def start_kit(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*KIT, *arguments], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def finish_kit(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    assert output, errors
    results: dict[str, Any] = json.loads(output)
    failed = [case for case in results["cases"] if case["outcome"] == "failed"]
    assert not failed, "\n".join(f"{case['name']}: {case['reason']} {case['transcript']}" for case in failed)
    assert process.returncode == 0
    return results


def run_kit(*arguments: str) -> dict[str, Any]:
    return finish_kit(start_kit(*arguments))


@pytest.fixture(scope="module")
def client_runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run the cases with both clients at the same time, because most cases wait."""
    command = [sys.executable, "-m"]
    options = ["client", "--json", "--limit", "60", "--"]
    runs = {name: start_kit(*options, *command, f"conformance.adapters.{name}") for name in ADAPTERS}
    yield runs
    for process in runs.values():
        process.kill()
        process.wait()


@pytest.mark.server
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_client_passes_all_cases(adapter: str, client_runs: dict[str, subprocess.Popen[str]]) -> None:
    results = finish_kit(client_runs[adapter])
    assert results["skipped"] == 0
    rules = Counter(case["source"] for case in results["cases"])
    assert set(rules) == {f"rule {number}" for number in range(1, 19)}


@pytest.mark.server
def test_the_server_passes_all_cases(redis: Redis) -> None:
    options = ["server", "--json", "--limit", "60"]
    with running_server() as genie:
        in_memory = run_kit(*options, f"127.0.0.1:{genie.port}")
    with running_server(token=CREDENTIAL) as genie:
        with_token = run_kit(*options, "--token", CREDENTIAL, f"127.0.0.1:{genie.port}")
    with running_server(redis, lease=60) as leader, running_server(redis, lease=60) as follower:
        follower.until("replica loaded")
        addresses = ["--follower", f"127.0.0.1:{follower.port}", f"127.0.0.1:{leader.port}"]
        with_redis = run_kit(*options, *addresses)
    outcomes = [{case["name"]: case["outcome"] for case in run["cases"]} for run in (in_memory, with_token, with_redis)]
    for case in load("server"):
        assert "passed" in [run[case.name] for run in outcomes], case.name


@pytest.mark.server
@pytest.mark.parametrize("name", DETECTED_QUICKLY)
def test_a_case_detects_a_mutant(name: str) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    names = {case.name for case in load("client" if mutant in CLIENT_MUTANTS else "server")}
    assert set(detect(mutant).split(", ")) <= names


def test_every_rule_and_every_command_has_a_mutant() -> None:
    assert {mutant.source for mutant in CLIENT_MUTANTS} == {str(number) for number in range(1, 19)}
    assert {mutant.source for mutant in SERVER_MUTANTS} >= set(FIELDS)


@pytest.mark.parametrize("direction", ["client", "server"])
def test_cases_name_existing_rules_and_sections(direction: str) -> None:
    lines = (ROOT / "protocol.md").read_text(encoding="utf-8").splitlines()
    headings = {line.lstrip("# ").replace("`", "") for line in lines if line.startswith("#")}
    for case in load(direction):
        kind, _, value = case.source.partition(" ")
        assert value in ({str(number) for number in range(1, 19)} if kind == "rule" else headings), case.name


@pytest.mark.server
def test_the_example_adapter_passes_simple_cases(tmp_path: Path) -> None:
    text = (ROOT / "conformance" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    adapter = tmp_path / "adapter.py"
    adapter.write_text(example, encoding="utf-8")
    names = [
        "the-second-address-if-the-first-refuses",
        "answers-in-another-order",
        "locked-much-later",
        "a-release-is-confirmed",
    ]
    filters = [option for name in names for option in ("--filter", name)]
    results = run_kit("client", "--json", "--limit", "60", *filters, "--", sys.executable, str(adapter))
    assert results["passed"] == len(names)
