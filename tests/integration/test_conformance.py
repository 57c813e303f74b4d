"""The conformance kit: both clients and the server pass all cases; a few mutants show that the cases detect defects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from servers import running_server

ROOT = Path(__file__).parent.parent.parent
KIT = [sys.executable, "-m", "conformance"]
CREDENTIAL = "Zq3vTokenOfTheKit"

pytestmark = pytest.mark.server


def run_kit(*arguments: str) -> dict[str, Any]:
    process = subprocess.run([*KIT, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    results: dict[str, Any] = json.loads(process.stdout) if process.stdout else {"failed": process.stderr}
    failures = [
        (case["name"], case["reason"], case["transcript"]) for case in results["cases"] if case["outcome"] == "failed"
    ]
    assert not failures, f"{process.stderr}\n{failures}"
    assert process.returncode == 0
    return results


@pytest.mark.parametrize("adapter", ["asyncio_client", "thread_client"])
def test_a_client_passes_all_cases(adapter: str) -> None:
    command = [sys.executable, "-m", f"conformance.adapters.{adapter}"]
    results = run_kit("client", "--json", "--limit", "60", "--", *command)
    assert results["skipped"] == 0
    rules = Counter(case["source"] for case in results["cases"])
    assert set(rules) == {f"rule {number}" for number in range(1, 17)}


def test_the_server_passes_all_cases() -> None:
    with running_server() as genie:
        results = run_kit("server", "--json", "--limit", "60", f"127.0.0.1:{genie.port}")
    skipped = [case for case in results["cases"] if case["outcome"] == "skipped"]
    with running_server(token=CREDENTIAL) as genie:
        with_token = run_kit("server", "--json", "--limit", "60", "--token", CREDENTIAL, f"127.0.0.1:{genie.port}")
    assert with_token["passed"] == len(skipped) > 0
    assert with_token["passed"] + with_token["skipped"] == len(results["cases"])
