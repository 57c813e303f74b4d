"""The report page of the soak: a plot for each measurement, with a mark for each fault."""

from __future__ import annotations

import os
import re

from benchmarks.soak import Samples, report, resident_mib


def test_each_plot_has_all_samples_and_all_faults() -> None:
    samples = Samples(
        at_s=[1.0, 2.0, 3.0],
        rate=[100.0, 0.0, 50.0],
        p99_ms=[1.0, 0.0, 1200.0],
        server_mib=[80.0, 81.0, 60.0],
        redis_mib=[9.0, 9.0, 9.5],
        faults=[(1.5, "kill <the> leader")],
        errors=3,
    )
    page = report(samples)
    lines = re.findall(r'<polyline points="([^"]+)"', page)
    assert [len(line.split()) for line in lines] == [3, 3, 3, 3]
    _, lowest, _ = (float(point.split(",")[1]) for point in lines[0].split())
    assert lowest == max(float(point.split(",")[1]) for point in lines[0].split()), "y grows downwards: 0 is lowest"
    assert page.count('class="fault"') == 4
    assert page.count("kill &lt;the&gt; leader") == 5
    assert "150 cycles, 1 faults, 3 errors" in page
    assert "http" not in page


def test_the_memory_of_a_process() -> None:
    assert resident_mib(os.getpid()) > 1
    assert resident_mib(2**22 + 1) == 0
