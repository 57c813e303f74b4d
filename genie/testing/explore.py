"""Runs a service in many simulated worlds, and shrinks the plan of faults of the first world in which it fails."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from inspect import iscoroutine
from pathlib import Path
from typing import Any, TextIO, cast

from genie.testing.faults import Fault, random_faults, shrunk_candidates
from genie.testing.simulation.redis.lua import require_lupa
from genie.testing.timeline import Line, as_page, as_text, timeline
from genie.testing.world import World, has_running_loop

Main = Callable[[], Coroutine[Any, Any, Any]]
"""Returns a coroutine that runs the service."""
Check = Callable[[Any], None]
"""Raises AssertionError if the result of the service is wrong."""
Plan = Callable[[int], Sequence[Fault]]
"""Returns the faults of a seed."""

CHUNK = 10
"""Number of seeds that one task of a worker process runs."""
MAX_SHRINK_RUNS = 200
"""Maximum number of runs in which the plan of faults is shrunk."""


class _StandardError:
    """Writes to the current `sys.stderr`, which a test framework may replace, and close after a test."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class Violation(AssertionError):
    """A service failed in a simulated world. The message has the seed, the shrunk plan of faults and the timeline."""

    def __init__(self, seed: int, faults: Sequence[Fault], error: BaseException, lines: Sequence[Line]) -> None:
        self.seed = seed
        self.faults = list(faults)
        self.error = error
        self.timeline = list(lines)
        super().__init__(f"{self.summary}\n\n{as_text(lines)}")

    @property
    def summary(self) -> str:
        """The error, the seed and the plan of faults, as Python source."""
        plan = "".join(f"    {fault!r},\n" for fault in self.faults)
        error = f"{type(self.error).__name__}: {self.error}"
        return f"seed {self.seed}: {error}\nfaults = [\n{plan}]"

    def page(self) -> str:
        """Return the timeline as a self-contained HTML page."""
        return as_page(f"Seed {self.seed}", self.summary, self.timeline)


@dataclass(slots=True)
class Run:
    """The outcome of one run."""

    error: BaseException | None
    """The error that `main` or the check has raised. None if the run succeeded."""
    faults: list[Fault]
    """The faults that were possible, with the names of their targets."""
    lines: list[Line]
    """The timeline."""


def run_once(main: Main, check: Check | None, seed: int, faults: Sequence[Fault]) -> Run:
    """Run a service in one world, and check its result."""
    world = World(seed, faults)
    error: BaseException | None = None
    try:
        coroutine = main()
        if not iscoroutine(coroutine):
            raise TypeError(f"main must return a coroutine, as an async function does, not {coroutine!r}")  # noqa: TRY301
        result = world.run(coroutine)
        if check is not None:
            check(result)
    except KeyboardInterrupt:
        raise
    except BaseException as caught:  # noqa: BLE001 - the finding; pytest.fail and sys.exit raise no Exception
        error = caught
    finally:
        world.loop.close()  # if `main` has raised an error before the world has run
    return Run(error, world.injected, timeline(world.entries))


def explore(
    main: Main,
    check: Check | None = None,
    *,
    seeds: int = 1000,
    first_seed: int = 0,
    plan: Plan = random_faults,
    processes: int | None = None,
    page: str | Path | None = None,
    progress: TextIO | None = cast("TextIO", _StandardError()),  # noqa: B008 - it has no state
) -> None:
    """Run `main()` in `seeds` simulated worlds. Raise Violation for the first seed that fails.

    Call this from a plain function.

    `main` returns a coroutine that runs the service. `check` is called with the result of the coroutine, and raises
    AssertionError if the result is wrong. Any exception of `main` is a failure, too, including those of `pytest.fail`
    and `sys.exit`. `plan` returns the faults of a seed.

    The runs are divided among `processes` processes, by default one for each processor. The plan of the first seed that
    fails is shrunk: faults that the failure does not need are removed, and the others are shortened. `page` is the path
    of a file for the timeline as HTML. If `progress` is not None, a line is written to it after each 100 seeds.
    """
    __tracebackhide__ = True  # pytest shows the line of the test instead
    require_lupa()
    if has_running_loop():
        raise RuntimeError(
            "genie.testing.explore() can't be called from a running event loop: call it from a plain function, or use the "
            "marker genie_explore"
        )
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, not {seeds}")
    if processes is None:
        processes = os.cpu_count() or 1
    end = first_seed + seeds
    chunks = [range(start, min(start + CHUNK, end)) for start in range(first_seed, end, CHUNK)]
    done_count = 0
    for failed_seed, run_count in _run_chunks(main, check, plan, chunks, processes):
        done_count += run_count
        completes_hundred = done_count % 100 < CHUNK
        if progress is not None and (failed_seed is not None or completes_hundred):
            print(f"{done_count} of {seeds} seeds", file=progress, flush=True)
        if failed_seed is not None:
            violation = _shrink(main, check, failed_seed, plan(failed_seed))
            if page is not None:
                Path(page).write_text(violation.page(), encoding="utf-8")
            raise violation


def _run_chunks(
    main: Main, check: Check | None, plan: Plan, chunks: Sequence[range], processes: int
) -> Iterator[tuple[int | None, int]]:
    """Run chunks of seeds.

    Yield for each chunk, in order, its first seed that fails, or None, and how many seeds were run.
    """
    if processes == 1 or len(chunks) == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from (_run_chunk(main, check, plan, chunk) for chunk in chunks)
        return
    global _inherited  # noqa: PLW0603 - the child processes inherit it, so `main` need not be picklable
    _inherited = main, check, plan
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"), initializer=_end_with_parent)
    try:
        yield from pool.map(_run_inherited_chunk, chunks)
    finally:
        pool.shutdown(cancel_futures=True)
        _inherited = None


_inherited: tuple[Main, Check | None, Plan] | None = None
"""The arguments for the worker processes, which inherit them from this process."""


def _end_with_parent() -> None:
    """End this worker process when its parent has ended.

    Without this, the workers of a killed program would wait forever: each keeps the pipe to the parent open for the
    others.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def _run_inherited_chunk(chunk: range) -> tuple[int | None, int]:
    """Run `_run_chunk` in a worker process."""
    assert _inherited is not None
    return _run_chunk(*_inherited, chunk)


def _run_chunk(main: Main, check: Check | None, plan: Plan, chunk: range) -> tuple[int | None, int]:
    """Run seeds until one fails. Return this seed, or None, and how many seeds were run."""
    for count, seed in enumerate(chunk, start=1):
        if run_once(main, check, seed, plan(seed)).error is not None:
            return seed, count
    return None, len(chunk)


def _shrink(main: Main, check: Check | None, seed: int, plan: Sequence[Fault]) -> Violation:
    """Return the violation with the simplest plan for which the seed was found to fail with the same type of error."""
    run = run_once(main, check, seed, plan)
    # Omit the faults that were impossible. The same error follows, unless the service depends on more than the seed.
    without_impossible = run_once(main, check, seed, run.faults)
    if type(without_impossible.error) is type(run.error):
        plan, run = run.faults, without_impossible
    run_count = 0
    is_simplified = True
    while is_simplified and run.error is not None:
        is_simplified = False
        for candidate in shrunk_candidates(plan):
            run_count += 1
            if run_count > MAX_SHRINK_RUNS:
                break
            candidate_run = run_once(main, check, seed, candidate)
            if type(candidate_run.error) is type(run.error):
                plan, run = candidate, candidate_run
                is_simplified = True
                break
    error = run.error or AssertionError(
        "failed in a worker process, but not again: the service depends on more than the seed"
    )
    return Violation(seed, plan, error, run.lines)
