"""What `genie bench` prints of a result, and which arguments it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from genie.bench.generator import NO_MESSAGE, RELEASED_BY_OTHER, Shape, Tally
from genie.bench.runner import CONNECTION_LOST, NOT_RELEASED, BenchOptions, Result
from genie.cli import main
from genie.cli.bench import document, headline, lines
from genie.client.config import Address

SHAPE = Shape(keys=3, shared_percent=75, resources=5)
PLAN = BenchOptions(
    address=Address("::1", 7),
    connections=1200,
    depth=2,
    measure_s=2.0,
    warm_up_s=0.5,
    timeout_s=5.0,
    shape=SHAPE,
)


def result(workload: str = "own", *, cycles: int = 1000, cpu_s: float = 0.5) -> Result:
    tally = Tally()
    for number in range(1, cycles + 1):
        tally.to_locked.add(number * 1_000)
        tally.to_released.add(number * 2_000_000)
    return Result(workload=workload, connections=1200, measured_s=2.0, client_cpu_s=cpu_s, tally=tally)


def test_a_table() -> None:
    assert headline(PLAN) == "[::1]:7, connections: 1,200, in flight on each: 2 requests"
    assert lines(result(), PLAN) == [
        "own: each request locks a key of its own",
        "  500 cycles/s (1,000 in 2.0 s), errors: none, client CPU: 25 %",
        "  FROM REQUEST TO         P50         P99       P99.9         MAX",
        "  locked               502 µs      991 µs      999 µs     1.00 ms",
        "  released         1002.44 ms  1988.10 ms  2000.00 ms  2000.00 ms",
    ]


def test_titles_say_what_was_set() -> None:
    assert lines(result("mixed"), PLAN)[0] == "mixed: requests lock one of 3 keys, 75 % of them shared"
    assert lines(result("several"), PLAN)[0] == "several: each request locks 5 keys of its own"
    one = replace(PLAN, shape=Shape(keys=1, shared_percent=75, resources=1))
    assert lines(result("mixed"), one)[0] == "mixed: requests lock the same key, 75 % of them shared"
    assert lines(result("several"), one)[0] == "several: each request locks 1 key of its own"


@pytest.mark.parametrize(
    ("ns", "told"),
    [(80_400, "80 µs"), (999_499, "999 µs"), (999_500, "1.00 ms"), (1_000_000, "1.00 ms"), (12_345_678, "12.35 ms")],
)
def test_a_time_has_digits_enough(ns: int, told: str) -> None:
    one = result(cycles=0)
    one.tally.to_locked.add(ns)
    assert lines(one, PLAN)[-1].split("  ")[-1] == told


def test_fewer_connections_than_were_asked_for_are_told() -> None:
    fewer = replace(result(), connections=1100)
    assert "(1,000 in 2.0 s), connections: 1,100 of 1,200, errors: none" in lines(fewer, PLAN)[1]
    assert document(PLAN, [fewer], interrupted=False)["workloads"][0]["connections"] == 1100


def test_errors_are_told_also_where_nothing_was_measured() -> None:
    nothing = result(cycles=0)
    nothing.tally.errors.update({"unavailable": 1_234, "connection-lost": 2})
    assert lines(nothing, PLAN)[1:] == [
        "  0 cycles/s (0 in 2.0 s), errors: connection-lost 2, unavailable 1,234, client CPU: 25 %",
    ]
    told = document(PLAN, [nothing], interrupted=False)["workloads"][0]
    assert told["errors"] == {"connection-lost": 2, "unavailable": 1_234}
    assert told["to_locked"] == {"p50_us": None, "p99_us": None, "p99_9_us": None, "max_us": None}


@pytest.mark.parametrize(
    ("cpu_s", "told"),
    [
        (1.7, "85 %"),
        (1.788, "89 %"),
        (1.792, "90 %: the client is the bottleneck"),
        (1.9, "95 %: the client is the bottleneck"),
    ],
)
def test_a_client_that_was_busy_all_the_time_says_so(cpu_s: float, told: str) -> None:
    assert lines(result(cpu_s=cpu_s), PLAN)[1].endswith(f", client CPU: {told}")


def test_a_document() -> None:
    assert document(PLAN, [result()], interrupted=True) == {
        "address": "[::1]:7",
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
    ("args", "says"),
    [
        ("cold", "'cold' is not one of 'own', 'hot', 'mixed', 'several'"),
        ("--connections 0", "a whole number from 1 to 20000 is needed"),
        ("--depth 0", "a whole number from 1 to 10000 is needed"),
        ("--connections 1001 --depth 1000", "1,000,000 at most"),
        ("--seconds 0", "not a number of seconds from 0.001"),
        ("--warm-up nan", "not a number of seconds from 0"),
        ("--shared 101", "a whole number from 0 to 100 is needed"),
        ("--keys 0", "a whole number from 1 to 1000 is needed"),
        ("--resources 101", "a whole number from 1 to 100 is needed"),
    ],
)
def test_wrong_arguments_are_explained(args: str, says: str) -> None:
    done = CliRunner().invoke(main, ["bench", *args.split()])
    assert done.exit_code == 2
    assert says in done.stderr


def test_help_explains_the_errors_that_no_server_gives() -> None:
    text = CliRunner().invoke(main, ["bench", "--help"]).output
    _, found = text.split("These names are not the server's:\n")
    names = re.findall(r"^    ([a-z-]+)  ", found.partition("\n\n")[0], re.MULTILINE)
    assert names == sorted([RELEASED_BY_OTHER, CONNECTION_LOST, NOT_RELEASED, NO_MESSAGE])
    assert "1 where any error was counted" in text
