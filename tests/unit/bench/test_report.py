"""What `genie bench` prints of a result, and which arguments it refuses."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from genie.bench.cycles import Tally
from genie.bench.load import Plan, Result
from genie.bench.workloads import Shape
from genie.cli import main
from genie.cli.bench_report import document, headline, lines

SHAPE = Shape(keys=3, shared_percent=75, resources=5)
PLAN = Plan(
    address=("::1", 7),
    connections=1200,
    depth=2,
    measure_s=2.0,
    warm_up_s=0.5,
    patience_s=5.0,
    shape=SHAPE,
)


def result(workload: str = "own", *, cycles: int = 1000, cpu_s: float = 0.5) -> Result:
    tally = Tally()
    for number in range(1, cycles + 1):
        tally.to_locked.add(number * 1_000)
        tally.to_released.add(number * 2_000_000)
    return Result(workload=workload, measured_s=2.0, client_cpu_s=cpu_s, tally=tally)


def test_a_table() -> None:
    assert headline(PLAN) == "[::1]:7, connections: 1,200, in flight on each: 2 requests"
    assert lines(result(), SHAPE) == [
        "own: each request locks a key of its own",
        "  500 cycles/s (1,000 in 2.0 s), errors: none, client CPU: 25 %",
        "  FROM REQUEST TO         P50         P99       P99.9         MAX",
        "  locked              0.50 ms     0.99 ms     1.00 ms     1.00 ms",
        "  released         1002.44 ms  1988.10 ms  2000.00 ms  2000.00 ms",
    ]


def test_titles_say_what_was_set() -> None:
    assert lines(result("mixed"), SHAPE)[0] == "mixed: requests lock one of 3 keys, 75 % of them shared"
    assert lines(result("several"), SHAPE)[0] == "several: each request locks 5 keys of its own"


def test_errors_are_told_also_where_nothing_was_measured() -> None:
    nothing = result(cycles=0)
    nothing.tally.errors.update({"unavailable": 1_234, "connection-lost": 2})
    assert lines(nothing, SHAPE)[1:] == [
        "  0 cycles/s (0 in 2.0 s), errors: connection-lost 2, unavailable 1,234, client CPU: 25 %",
    ]
    told = document(PLAN, [nothing], interrupted=False)["workloads"][0]
    assert told["errors"] == {"connection-lost": 2, "unavailable": 1_234}
    assert told["to_locked"] == {"p50_us": None, "p99_us": None, "p99_9_us": None, "max_us": None}


@pytest.mark.parametrize(("cpu_s", "told"), [(1.7, False), (1.9, True)])
def test_a_client_that_was_busy_all_the_time_says_so(cpu_s: float, told: bool) -> None:
    assert any("CPU: 95 %, so the server may do more" in line for line in lines(result(cpu_s=cpu_s), SHAPE)) == told


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
        ("--connections 0", "1<=x<=20000"),
        ("--depth 0", "1<=x<=10000"),
        ("--connections 1001 --depth 1000", "1,000,000 at most"),
        ("--seconds 0", "not a number of seconds from 0.001"),
        ("--warm-up nan", "not a number of seconds from 0"),
        ("--shared 101", "0<=x<=100"),
        ("--keys 0", "1<=x<=1000"),
        ("--resources 101", "1<=x<=100"),
    ],
)
def test_wrong_arguments_are_explained(args: str, says: str) -> None:
    done = CliRunner().invoke(main, ["bench", *args.split()])
    assert done.exit_code == 2
    assert says in done.stderr
