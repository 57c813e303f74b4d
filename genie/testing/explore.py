"""Run a service in many simulated worlds, and shrink the plan of faults of the first that fails."""

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
Check = Callable[[Any], None]
Plan = Callable[[int], Sequence[Fault]]

CHUNK = 10
"""Number of seeds that one task of a worker process runs."""
MAX_SHRINK_RUNS = 200
"""Maximum number of runs in which the plan of faults is shrunk."""


class _StandardError:
    """The standard error output when a line is printed: a test framework may replace it, and close it after a test."""

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
    """The outcome of one run. `error` is what `main` or the check has raised; None if the run succeeded."""

    error: BaseException | None
    faults: list[Fault]
    """The faults that were possible, with the names of their targets."""
    lines: list[Line]


def _checked(coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
    if not iscoroutine(coroutine):
        raise TypeError(f"main must return a coroutine, as an async function does, not {coroutine!r}")
    return coroutine


def run_once(main: Main, check: Check | None, seed: int, faults: Sequence[Fault]) -> Run:
    """Run a service in one world, and check its result."""
    world = World(seed, faults)
    error: BaseException | None = None
    try:
        result = world.run(_checked(main()))
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

    `main` returns a coroutine that runs the service. `check` is called with the result of the coroutine, and raises
    AssertionError if the result is wrong. Any exception of `main` is a failure, too, including those of `pytest.fail` and
    `sys.exit`. `plan` returns the faults of a seed.

    The runs are divided among `processes` processes, by default one for each processor. The plan of the first seed that fails
    is shrunk: faults that the failure does not need are removed, and the others are shortened. `page` is the path of a file
    for the timeline as HTML. `progress`, if it is not None, gets a line after each 100 seeds. Call it from a plain function.
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
    processes = os.cpu_count() or 1 if processes is None else processes
    chunks = [
        range(start, min(start + CHUNK, first_seed + seeds)) for start in range(first_seed, first_seed + seeds, CHUNK)
    ]
    done = 0
    for failed, count in _run_chunks(main, check, plan, chunks, processes):
        done += count
        if progress is not None and (failed is not None or done % 100 < CHUNK):
            print(f"{done} of {seeds} seeds", file=progress, flush=True)
        if failed is not None:
            violation = _shrink(main, check, failed, plan(failed))
            if page is not None:
                Path(page).write_text(violation.page(), encoding="utf-8")
            raise violation


def _run_chunks(
    main: Main, check: Check | None, plan: Plan, chunks: Sequence[range], processes: int
) -> Iterator[tuple[int | None, int]]:
    """Yield for each chunk, in order, its first seed that fails, or None, and how many seeds were run."""
    if processes == 1 or len(chunks) == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from (_run_chunk(main, check, plan, chunk) for chunk in chunks)
        return
    global _forked  # noqa: PLW0603 - the child processes inherit it, so `main` may be any function
    _forked = main, check, plan
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"), initializer=_end_with_parent)
    try:
        yield from pool.map(_run_forked_chunk, chunks)
    finally:
        pool.shutdown(cancel_futures=True)
        _forked = None


_forked: tuple[Main, Check | None, Plan] | None = None


def _end_with_parent() -> None:
    """End this process when its parent has ended. Otherwise the processes of a program that is killed would wait forever.

    They keep the pipe to the parent open for each other. The last one of them ends first.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def _run_forked_chunk(chunk: range) -> tuple[int | None, int]:
    assert _forked is not None
    return _run_chunk(*_forked, chunk)


def _run_chunk(main: Main, check: Check | None, plan: Plan, chunk: range) -> tuple[int | None, int]:
    for count, seed in enumerate(chunk, start=1):
        if run_once(main, check, seed, plan(seed)).error is not None:
            return seed, count
    return None, len(chunk)


def _shrink(main: Main, check: Check | None, seed: int, plan: Sequence[Fault]) -> Violation:
    """Return the violation with the simplest plan that was found to fail with this seed."""
    run = run_once(main, check, seed, plan)
    # Omit the faults that were impossible. The same error follows, unless the service depends on more than the seed.
    without_impossible = run_once(main, check, seed, run.faults)
    if type(without_impossible.error) is type(run.error):
        plan, run = run.faults, without_impossible
    run_count = 0
    is_shrinking = True
    while is_shrinking and run.error is not None:
        is_shrinking = False
        for candidate in shrunk_candidates(plan):
            run_count += 1
            if run_count > MAX_SHRINK_RUNS:
                break
            candidate_run = run_once(main, check, seed, candidate)
            if type(candidate_run.error) is type(run.error):
                plan = candidate
                run = candidate_run
                is_shrinking = True
                break
    error = run.error or AssertionError(
        "failed in a worker process, but not again: the service depends on more than the seed"
    )
    return Violation(seed, plan, error, run.lines)
