"""The output of `genie bench`, and its argument errors."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from genie import build
from genie.bench.generator import PROTOCOL_ERROR, RELEASED_BY_OTHER, Tally, WorkloadParameters
from genie.bench.runner import CONNECTION_LOST, NOT_RELEASED, BenchOptions, Result
from genie.cli import main
from genie.cli.bench import header_lines, json_document, result_lines
from genie.client.config import Address

PARAMETERS = WorkloadParameters(keys=3, shared_percent=75, resources=5)
OPTIONS = BenchOptions(
    address=Address("::1", 7),
    connections=1200,
    depth=2,
    measure_s=2.0,
    warm_up_s=0.5,
    timeout_s=5.0,
    parameters=PARAMETERS,
)

SERVER = "genie/9.8.7 (compiled; CPython 3.99.1, optimized)"


def result(workload: str = "own", *, cycles: int = 1000, cpu_s: float = 0.5) -> Result:
    tally = Tally()
    for number in range(1, cycles + 1):
        tally.to_locked.add(number * 1_000)
        tally.to_released.add(number * 2_000_000)
    return Result(workload=workload, connections=1200, measured_s=2.0, client_cpu_s=cpu_s, tally=tally)


def test_text_output() -> None:
    assert header_lines(OPTIONS, SERVER) == [
        "[::1]:7, connections: 1,200, in flight on each: 2 requests",
        "server: genie/9.8.7 (compiled; CPython 3.99.1, optimized)",
        f"client: {build.description()}",
    ]
    assert result_lines(result(), OPTIONS) == [
        "own: each request locks a key of its own",
        "  500 cycles/s (1,000 in 2.0 s), errors: none, client CPU: 25 %",
        "  FROM REQUEST TO         P50         P99       P99.9         MAX",
        "  locked               502 µs      991 µs      999 µs     1.00 ms",
        "  released         1002.44 ms  1988.10 ms  2000.00 ms  2000.00 ms",
    ]


def test_titles_contain_the_parameters() -> None:
    assert result_lines(result("mixed"), OPTIONS)[0] == "mixed: requests lock one of 3 keys, 75 % of them shared"
    assert result_lines(result("several"), OPTIONS)[0] == "several: each request locks 5 keys of its own"
    one = replace(OPTIONS, parameters=WorkloadParameters(keys=1, shared_percent=75, resources=1))
    assert result_lines(result("mixed"), one)[0] == "mixed: requests lock the same key, 75 % of them shared"
    assert result_lines(result("several"), one)[0] == "several: each request locks 1 key of its own"


@pytest.mark.parametrize(
    ("ns", "text"),
    [(80_400, "80 µs"), (999_499, "999 µs"), (999_500, "1.00 ms"), (1_000_000, "1.00 ms"), (12_345_678, "12.35 ms")],
)
def test_latencies_have_at_least_three_digits(ns: int, text: str) -> None:
    one = result(cycles=0)
    one.tally.to_locked.add(ns)
    assert result_lines(one, OPTIONS)[-1].split("  ")[-1] == text


def test_lost_connections_are_reported() -> None:
    fewer = replace(result(), connections=1100)
    assert "(1,000 in 2.0 s), connections: 1,100 of 1,200, errors: none" in result_lines(fewer, OPTIONS)[1]
    assert json_document(OPTIONS, SERVER, [fewer], interrupted=False)["workloads"][0]["connections"] == 1100


def test_errors_are_reported_without_a_measurement() -> None:
    nothing = result(cycles=0)
    nothing.tally.errors.update({"unavailable": 1_234, "connection-lost": 2})
    assert result_lines(nothing, OPTIONS)[1:] == [
        "  0 cycles/s (0 in 2.0 s), errors: connection-lost 2, unavailable 1,234, client CPU: 25 %"
    ]
    row = json_document(OPTIONS, SERVER, [nothing], interrupted=False)["workloads"][0]
    assert row["errors"] == {"connection-lost": 2, "unavailable": 1_234}
    assert row["to_locked"] == {"p50_us": None, "p99_us": None, "p99_9_us": None, "max_us": None}


@pytest.mark.parametrize(
    ("cpu_s", "text"),
    [
        (1.7, "85 %"),
        (1.788, "89 %"),
        (1.792, "90 %: the client is the bottleneck"),
        (1.9, "95 %: the client is the bottleneck"),
    ],
)
def test_a_busy_client_is_reported_as_the_bottleneck(cpu_s: float, text: str) -> None:
    assert result_lines(result(cpu_s=cpu_s), OPTIONS)[1].endswith(f", client CPU: {text}")


def test_json_output() -> None:
    assert json_document(OPTIONS, SERVER, [result()], interrupted=True) == {
        "address": "[::1]:7",
        "server": SERVER,
        "client": build.description(),
        "settings": {
            "connections": 1200,
            "depth": 2,
            "measure_s": 2.0,
            "warm_up_s": 0.5,
            "keys": 3,
            "shared_percent": 75,
            "resources": 5,
        },
        "interrupted": True,
        "workloads": [
            {
                "workload": "own",
                "connections": 1200,
                "measured_s": 2.0,
                "cycles": 1000,
                "cycles_per_s": 500.0,
                "client_cpu_percent": 25.0,
                "to_locked": {"p50_us": 501.8, "p99_us": 991.2, "p99_9_us": 999.4, "max_us": 1000.0},
                "to_released": {"p50_us": 1002438.7, "p99_us": 1988100.1, "p99_9_us": 2000000.0, "max_us": 2000000.0},
                "errors": {},
            }
        ],
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("cold", "'cold' is not one of 'own', 'hot', 'mixed', 'several'"),
        ("--connections 0", "a whole number from 1 to 20000 is needed"),
        ("--depth 0", "a whole number from 1 to 10000 is needed"),
        ("--connections 1001 --depth 1000", "at most 1,000,000"),
        ("--seconds 0", "not a number of seconds from 0.001"),
        ("--warm-up nan", "not a number of seconds from 0"),
        ("--shared 101", "a whole number from 0 to 100 is needed"),
        ("--keys 0", "a whole number from 1 to 1000 is needed"),
        ("--resources 101", "a whole number from 1 to 100 is needed"),
    ],
)
def test_invalid_arguments_are_usage_errors(args: str, message: str) -> None:
    done = CliRunner().invoke(main, ["bench", *args.split()])
    assert done.exit_code == 2
    assert message in done.stderr


def test_help_explains_the_errors_of_the_client() -> None:
    text = CliRunner().invoke(main, ["bench", "--help"]).output
    _, found = text.split("These names are not the server's:\n")
    names = re.findall(r"^    ([a-z-]+)  ", found.partition("\n\n")[0], re.MULTILINE)
    assert names == sorted([RELEASED_BY_OTHER, CONNECTION_LOST, NOT_RELEASED, PROTOCOL_ERROR])
    assert "1 if there were errors" in text
