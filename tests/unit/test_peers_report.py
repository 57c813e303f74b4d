"""The report of the benchmark against other lock servers: its statistics and tables."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import options, write
from benchmarks.peers.figures import Sample, percentile, summarize
from benchmarks.peers.peer import Step
from benchmarks.peers.report import Report, filesystem
from benchmarks.peers.slock import SlockPipeline
from benchmarks.peers.table import BEGIN, END, between, errors, markdown, put

SAMPLE = Sample(
    cycles=1_000,
    seconds=2.0,
    p50_us=100.0,
    p99_us=900.0,
    errors=0,
    refused=10,
    handed_over=500,
    least=5,
    most=20,
    server_s=1.0,
    load_s=0.5,
    others_s=0.2,
)


def report(*samples: Sample) -> Report:
    return Report(
        date="2026-01-02",
        machine="2 processors",
        pinning="servers on processor 0, load on processor 1",
        rounds=len(samples),
        filesystem="ext4",
        seconds=2.0,
        warmup=0.3,
        versions=["Genie 1", "Redis 7"],
        skipped={"etcd": "it is not installed"},
        samples={"own": {"Genie": list(samples)}, "hot": {"Genie": list(samples), "Redis": []}},
    )


def test_one_percent_of_the_values_exceed_the_99th_percentile() -> None:
    values = [float(number) for number in range(1, 1001)]
    assert percentile(values, 0.99) == 990
    assert percentile(values, 0.5) == 500


def test_rounds_are_combined_as_medians_and_errors_as_a_sum() -> None:
    slow = replace(SAMPLE, cycles=500, p50_us=200.0, errors=3)
    fast = replace(SAMPLE, cycles=4_000, p50_us=50.0, errors=4, server_s=2.0)
    summary = summarize([fast, SAMPLE, slow])
    assert (summary.rounds, summary.rate, summary.rate_least, summary.rate_most) == (3, 500, 250, 2_000)
    assert (summary.p50_us, summary.errors) == (100, 7)
    assert summary.server_us == pytest.approx(1_000)
    assert (summary.evenness, summary.server_share, summary.load_share) == (0.25, 0.5, 0.25)
    assert not summary.load_bound


def test_a_round_without_cycles_does_not_divide_by_zero() -> None:
    summary = summarize([replace(SAMPLE, cycles=0, most=0, least=0)])
    assert (summary.rate, summary.server_us, summary.evenness, summary.handed_over) == (0, 0, 0, 0)


def test_the_tables_have_a_row_for_each_measured_peer() -> None:
    lines = markdown(report(SAMPLE)).splitlines()
    (row, hot) = [line for line in lines if line.startswith("| Genie")]
    assert row == "| Genie | 500 | 500 to 500 | 100 µs | 900 µs | 1.00 ms | 50 % | 25 % | 0 |"
    assert hot == row + " 50 % | 25 % |"
    assert not [line for line in lines if line.startswith("| Redis")]
    assert "### One connection" not in lines
    assert "- etcd: it is not installed" in lines
    assert lines[0].endswith("did other work for 10 % of one processor (median).")
    assert "Versions: Genie 1, Redis 7." in lines
    assert "; the data of the servers on ext4. Each peer ran once, in turns with the others. " in lines[0]
    assert "each for 2 s, after a warm-up of 0.3 s that is not counted. " in lines[0]
    header, rule = lines[lines.index(row) - 2 : lines.index(row)]
    assert header.count("|") == rule.count("|") == row.count("|")


def test_a_rate_limited_by_the_load_generator_is_marked() -> None:
    assert "| Genie | ≥ 500 |" in markdown(report(replace(SAMPLE, load_s=1.99)))


def test_errors_are_reported() -> None:
    assert errors(report(SAMPLE)) == []
    assert errors(report(replace(SAMPLE, errors=2)))[0] == "Genie, 64 connections or tasks, a key for each: 2 errors"


def test_only_the_text_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "folder" / "page.md"
    put("new", page)
    assert page.read_text() == "new"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put("table\n", page)
    put("table\n", page)
    assert page.read_text() == f"before\n{BEGIN}\n\ntable\n\n{END}\nafter\n"
    assert between("no marks", "text") == "text"


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /mnt/in\\040memory tmpfs rw 0 0
/dev/vdb /mnt/twice xfs rw 0 0
/dev/vdc /mnt/twice btrfs rw 0 0
"""


def test_a_folder_belongs_to_the_innermost_mount() -> None:
    assert filesystem(Path("/mnt/elsewhere"), MOUNTS) == "ext4"
    assert filesystem(Path("/mnt/in memory/folder"), MOUNTS) == "tmpfs"
    assert filesystem(Path("/mnt/in memory, too"), MOUNTS) == "ext4"
    assert filesystem(Path("/mnt/twice"), MOUNTS) == "btrfs"
    assert filesystem(Path("/mnt"), "") == ""


def test_without_samples_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture, figures = tmp_path / "page.md", tmp_path / "plot.png", tmp_path / "figures.json"
    page.write_text("old")
    assert not report().measured
    write(report(), options(["--table", str(page), "--plot", str(picture), "--json", str(figures)]))
    assert page.read_text() == "old"
    assert not picture.exists()
    assert json.loads(figures.read_text())["skipped"] == {"etcd": "it is not installed"}
    assert "Nothing was measured" in capsys.readouterr().out


def test_the_json_contains_every_round() -> None:
    found = json.loads(report(SAMPLE, SAMPLE).json())
    assert len(found["samples"]["own"]["Genie"]) == 2
    assert found["summaries"]["own"]["Genie"]["rate"] == 500
    assert found["summaries"]["hot"].keys() == {"Genie"}


def test_a_key_of_a_pipeline_is_found_by_the_reply_of_slock() -> None:
    pipeline = SlockPipeline(socket.socket(), ["a", "b"], number=7)
    locked, unlocked = pipeline.lock(1), pipeline.unlock(0)
    assert len(locked) == len(unlocked) == 64
    assert pipeline.read(locked[:30]) == []
    assert pipeline.read(locked[30:] + unlocked) == [(1, Step.LOCKED), (0, Step.UNLOCKED)]
    assert pipeline.read(locked[:19] + b"\x05" + locked[20:]) == [(1, Step.ERROR)]
    pipeline.sock.close()


def test_a_report_says_that_other_programs_disturbed_the_measurement() -> None:
    assert "disturbed" not in markdown(report(SAMPLE))
    assert "**Other programs disturbed this measurement.**" in markdown(report(replace(SAMPLE, others_s=0.6)))
