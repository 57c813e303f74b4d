"""The report page of the soak: a plot for each measurement, with a mark for each fault."""

from __future__ import annotations

import os
import re
from collections import Counter
from random import Random

import pytest

from benchmarks.soak import KINDS, SHARED_KEYS, Samples, lock_of, report, resident_mib
from genie.protocol.resources import parse_resource_arg, split_by_mode


def test_each_plot_has_all_samples_and_all_faults() -> None:
    samples = Samples(
        at_s=[1.0, 2.0, 3.0],
        rate=[100.0, 0.0, 50.0],
        p99_ms=[1.0, 0.0, 1200.0],
        server_mib=[80.0, 81.0, 60.0],
        redis_mib=[9.0, 9.0, 9.5],
        faults=[(1.5, "kill <the> leader")],
        errors=3,
        cycles=Counter({"units": 1_150}),
    )
    page = report(samples)
    lines = re.findall(r'<polyline points="([^"]+)"', page)
    assert [len(line.split()) for line in lines] == [3, 3, 3, 3]
    _, lowest, _ = (float(point.split(",")[1]) for point in lines[0].split())
    assert lowest == max(float(point.split(",")[1]) for point in lines[0].split()), "y grows downwards: 0 is lowest"
    assert page.count('class="fault"') == 4
    assert page.count("kill &lt;the&gt; leader") == 5
    assert "150 cycles, 1 faults, 3 errors" in page
    assert "<td>units</td><td>1,150</td>" in page
    assert "http" not in page


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_a_lock_that_the_server_knows(kind: str) -> None:
    locks = {lock_of(kind, 7, Random(seed)) for seed in range(99)}  # noqa: S311
    units = [split_by_mode([parse_resource_arg(lock)])[2] for lock in locks]
    assert len(locks) == {"own name": 1, "units": 3, "subtree": 1}.get(kind, SHARED_KEYS)
    assert all((each is not None) == (kind == "units") for each in units)


def test_the_memory_of_a_process() -> None:
    assert resident_mib(os.getpid()) > 1
    assert resident_mib(2**22 + 1) == 0
