"""The hot modules compiled to C: the same files, the same behaviour.

`make test` runs the short form, `make compiled` and `make soak` the long one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.runs.searches import SOAK

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/unit/core",
    "tests/unit/history",
    "tests/unit/protocol",
    "tests/unit/storage",
    "tests/integration/test_commit_log.py",
    "tests/integration/test_wire.py",
    "tests/integration/test_conformance.py::test_the_server_passes_all_cases",
]
EXCLUDED = [
    "test_instruction_counts.py",  # counts bytecode instructions
    "test_work.py",  # the same
    "test_arrival_bounds.py",  # the same, and replaces methods, which are called directly
    "test_the_state_of_a_leader_is_freed_when_another_server_leads",  # by weak references, which compiled classes don't have
    "test_the_search_for_a_cycle_visits_only_reachable_owners",  # replaces the class of the table
    "test_a_request_that_is_not_analysed_completely_counts_once",  # replaces a constant, which is compiled in
    "test_classes_edges_and_inversions_are_bounded",  # the same
    "test_a_replay_begins_in_the_middle",  # the same
    "test_the_lines_of_commands_are_read_as_the_events_that_they_caused",  # the same
    "test_recorded_commands.py",  # has subclasses of compiled classes
    "test_watch_search.py",  # has a stand-in for an object of a compiled class
    "test_fast_path.py",  # reads all attributes, which compiled classes don't list
    # These count bytecode instructions, too.
    "test_units_are_handed_over_at_the_same_cost_in_a_long_queue",
    "test_a_request_for_units_joins_a_long_queue_at_the_same_cost",
    "test_an_inspection_of_a_subtree_reads_a_bounded_number_of_holders_and_waiters",
    "test_an_arrival_that_closes_no_cycle_takes_the_same_work_with_many_waiters",
    "test_the_end_of_a_subtree_lock_reads_few_of_the_waiters_below",
    "test_the_subtree_of_all_names_takes_no_instructions_for_exclusive_locks",
    # These replace constants, functions or methods, which are compiled in.
    "test_no_request_overtakes_without_need",
    "test_the_quick_answer_is_that_of_the_reduction",
    "test_a_follower_frees_a_large_state_in_parts",
    "test_a_former_leader_frees_its_state_in_parts",
    "test_a_new_leader_searches_for_grantable_requests_in_parts",
    "test_the_choices_of_a_request_are_measured_once",
    "test_expensive_commands_to_many_namespaces_do_not_add_up",
    "test_the_parts_of_a_namespace_do_not_add_up",
    "test_random_watches_get_the_events_of_their_time",
    "test_a_state_that_is_loaded_in_any_order_decides_as_the_original",  # copies objects of compiled classes
    # These have stand-ins for objects of compiled classes.
    "test_an_error_within_a_transaction_is_retried_with_a_backoff",
    "test_each_attempt_without_a_reply_doubles_the_timeout",
    "test_a_batch_is_sent_that_follows_one_whose_connection_does_not_watch_the_log_any_more",
    "test_a_reply_after_the_node_has_stepped_down_is_ignored",
]
LONG_TESTS = ["tests/unit/server"]
"""Tests that only the long form runs. They take half a minute."""
LONG_FILES = [
    "test_bound.py",
    "test_pending_grants.py",
    "test_reduction_bounds.py",
    "test_structures.py",
    "test_subtree_bounds.py",
    "test_tables.py",
]
"""Files of `TESTS` that only the long form runs. They take seconds, because they measure sizes and bounds, or repeat one
search with many parameters."""
SIMULATION = """
import gc
from itertools import islice
from simulator.soak import run, seeds_of_all_kinds
for seed in (3_000_000, 3_000_000, 3_000_000, *islice(seeds_of_all_kinds(), 12)):
    cluster, failures = run(seed)
    assert not failures, (seed, failures)
    del cluster
    gc.collect()
"""
"""Simulated scenarios. They close coroutines, which no other test does: in the first, of a follower that waits for Redis."""
QUICK_COMPILER = """#!/bin/sh
for option; do
  shift
  case "$option" in -W[!l]*) ;; *) set -- "$@" "$option" ;; esac  # -Wl, is for the linker
done
exec cc "$@" -O0 -g0 -w
"""
"""Of several levels of optimization the last counts. `-w` alone omits the messages, and does not save the search for them."""


@pytest.mark.parametrize("name", EXCLUDED + LONG_FILES)
def test_the_excluded_tests_exist(name: str) -> None:
    files = [path for folder in TESTS + LONG_TESTS for path in (ROOT / folder).rglob("*.py")]
    assert any(path.name == name or f"def {name}(" in path.read_text() for path in files)


def _headers() -> Path:
    """Return the file that a compiled module includes. Debian keeps it in a package of its own."""
    return Path(sysconfig.get_path("include"), "Python.h")


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, such as gcc with libc6-dev")
@pytest.mark.skipif(not _headers().exists(), reason=f"needs {_headers()}, such as from python3-dev")
def test_the_compiled_modules_pass_the_same_tests(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("genie", "simulator", "tests", "conformance"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("conftest.py", "pyproject.toml", "README.md", "protocol.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _compile(source, tmp_path / "quick-cc")

    environment = {**os.environ, "PYTHONPATH": str(source)}
    where = "import genie.core.manager as m, genie.server.pipeline as p; print(m.__file__, p.__file__)"
    seen = subprocess.run(
        [sys.executable, "-c", where], cwd=source, env=environment, check=True, capture_output=True, text=True
    )
    assert all(path.startswith(str(source)) and path.endswith(".so") for path in seen.stdout.split())
    left_out, tests = (EXCLUDED, TESTS + LONG_TESTS) if SOAK else (EXCLUDED + LONG_FILES, TESTS)
    deselect = " and ".join(f"not {name.removesuffix('.py')}" for name in left_out)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", deselect, *tests],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    simulated = subprocess.run(
        [sys.executable, "-c", SIMULATION],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert simulated.returncode == 0, simulated.stdout[-3000:] + simulated.stderr[-3000:]


def _compile(source: Path, compiler: Path) -> None:
    """Compile the hot modules beside their sources, as for a wheel. The C compiler neither optimizes nor warns: both take long.

    The wheel itself is not made.
    """
    compiler.write_text(QUICK_COMPILER)
    compiler.chmod(0o755)
    environment = {**os.environ, "HATCH_BUILD_HOOK_ENABLE_MYPYC": "true", "CC": str(compiler)}
    environment["LDSHARED"] = f"{compiler} -shared"
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--hooks-only"]
    built = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
