"""`genie bench`: run workloads against a server, and show throughput and latencies as text or JSON."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from click.core import ParameterSource

from genie import build
from genie.bench.generator import WORKLOADS, WorkloadParameters
from genie.bench.histogram import Histogram
from genie.bench.profiles import BUILT_IN, Phase, PhaseResult, load, run_phase
from genie.bench.runner import BenchOptions, LoadRunner, Result
from genie.cli.format import table
from genie.cli.inspect import INDENT
from genie.cli.options import INTERRUPTED, InvalidArgument, WholeNumber, json_option, run_on_uvloop, seconds
from genie.cli.output import print_json, print_lines
from genie.cli.query import QueriedServer, Querier, server_query
from genie.client import aio
from genie.client.config import Address, format_address
from genie.errors import ConnectionLost, GenieError, Unavailable
from genie.protocol import codec

BUSY_CPU_PERCENT = 90
"""From this CPU usage on, the client is reported as the bottleneck."""
QUANTILES = {"p50": 500, "p99": 990, "p99_9": 999}
"""The reported quantiles in thousandths, by their names in JSON."""
HEADERS = ("FROM REQUEST TO", "P50", "P99", "P99.9", "MAX")
NUMBER_COLUMNS = range(1, len(HEADERS))
"""Indexes of the right-aligned columns."""

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
MIN_NS_SHOWN_IN_MS = 999_500
"""Shorter times are shown in µs, where they have at most three digits."""
CLEAR_LINE = "\r\x1b[K"
"""Moves the cursor of the terminal to the beginning of its line, and clears the line."""


def _write_progress(text: str) -> None:
    """Overwrite the progress line on stderr, which must be a terminal."""
    sys.stderr.write(f"{CLEAR_LINE}{text}")
    sys.stderr.flush()


def _show_progress(workload: str, elapsed_s: float | None, cycles: int) -> None:
    """Show the progress of a workload. `elapsed_s` is None during the warm-up."""
    progress = "warming up" if elapsed_s is None else f"{elapsed_s:.1f} s, {cycles / elapsed_s:,.0f} cycles/s"
    _write_progress(f"{workload}: {progress}")


def header_lines(options: BenchOptions, server: str) -> list[str]:
    """Return the first lines of the text output: address, connections and depth, and the builds of server and client.

    `server` is the version and the build of the server.
    """
    in_flight = "1 request" if options.depth == 1 else f"{options.depth:,} requests"
    return [
        f"{format_address(options.address)}, connections: {options.connections:,}, in flight on each: {in_flight}",
        f"server: {server}",
        f"client: {build.description()}",
    ]


def _format_errors(errors: Mapping[str, int]) -> str:
    """Return the errors with their numbers, or `none`: `connection-lost 2, timeout 1`."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(errors.items())) or "none"


def result_lines(result: Result, options: BenchOptions) -> list[str]:
    """Return the result of a workload as lines of text: the title, a summary line, and a table of latencies.

    The summary shows the number of connections only if some of them were lost before the end of the measurement.
    """
    summary = f"{result.cycles_per_s:,.0f} cycles/s ({result.cycles:,} in {result.measured_s:.1f} s)"
    if result.connections < options.connections:
        summary += f", connections: {result.connections:,} of {options.connections:,}"
    cpu_percent = round(result.client_cpu_percent)
    summary += f", errors: {_format_errors(result.tally.errors)}, client CPU: {cpu_percent} %"
    if cpu_percent >= BUSY_CPU_PERCENT:
        summary += ": the client is the bottleneck"
    rows = []
    for name, histogram in (("locked", result.tally.to_locked), ("released", result.tally.to_released)):
        if histogram.count:
            latencies_ns = [*_quantiles_ns(histogram), histogram.max_ns]
            rows.append([name, *map(_format_ns, latencies_ns)])
    latency_lines = table(HEADERS, rows, right_aligned=NUMBER_COLUMNS) if rows else []
    title = f"{result.workload}: {WORKLOADS[result.workload].title(options.parameters)}"
    return [title, *(INDENT + line for line in (summary, *latency_lines))]


def json_document(options: BenchOptions, server: str, results: list[Result], *, interrupted: bool) -> dict[str, Any]:
    """Return the document that `--json` prints. Field names end with their units. `server` is the server's build."""
    return {
        "address": format_address(options.address),
        "server": server,
        "client": build.description(),
        "settings": {
            "connections": options.connections,
            "depth": options.depth,
            "measure_s": options.measure_s,
            "warm_up_s": options.warm_up_s,
            **asdict(options.parameters),
        },
        "interrupted": interrupted,
        "workloads": [_json_result(result) for result in results],
    }


def _json_result(result: Result) -> dict[str, Any]:
    """Return the JSON object of one workload in the document."""
    return {
        "workload": result.workload,
        "connections": result.connections,
        "measured_s": round(result.measured_s, 6),
        "cycles": result.cycles,
        "cycles_per_s": round(result.cycles_per_s, 1),
        "client_cpu_percent": round(result.client_cpu_percent, 1),
        "to_locked": _json_latencies(result.tally.to_locked),
        "to_released": _json_latencies(result.tally.to_released),
        "errors": dict(result.tally.errors),
    }


def _json_latencies(histogram: Histogram) -> dict[str, float | None]:
    """Return the quantiles and the maximum of latencies in µs, by field name. They are None if nothing was measured."""
    latencies_ns = dict(zip(QUANTILES, _quantiles_ns(histogram), strict=True))
    latencies_ns["max"] = histogram.max_ns if histogram.count else None
    return {f"{name}_us": None if ns is None else round(ns / NS_PER_US, 1) for name, ns in latencies_ns.items()}


def _quantiles_ns(histogram: Histogram) -> list[int | None]:
    """Return the quantiles in the order of `QUANTILES`, each None if nothing was measured."""
    return [histogram.quantile_ns(per_mille) for per_mille in QUANTILES.values()]


def _format_ns(ns: int | None) -> str:
    """Format a duration in µs or ms. None, a quantile without measurements, becomes an empty table cell."""
    if ns is None:
        return ""
    return f"{ns / NS_PER_US:.0f} µs" if ns < MIN_NS_SHOWN_IN_MS else f"{ns / NS_PER_MS:.2f} ms"


# -- `genie bench` --------

MAX_IN_FLIGHT = 1_000_000
"""Maximum number of requests in flight on all connections."""

_option = functools.partial(click.option, show_default=True)
_DEFAULTS = WorkloadParameters()
_NAMES = ", ".join(BUILT_IN)


@click.command()
@click.argument("workloads", nargs=-1, type=click.Choice(list(WORKLOADS)), metavar="[WORKLOAD]...")
@_option("--connections", type=WholeNumber(1, 20_000), default=64, metavar="N", help="Connections to the server.")
@_option("--depth", type=WholeNumber(1, 10_000), default=1, metavar="N", help="Requests in flight on each connection.")
@_option(
    "--seconds", "measure_s", type=seconds(0.001), default=5, metavar="SECONDS", help="Measured time of each workload."
)
@_option(
    "--warm-up",
    "warm_up_s",
    type=seconds(0),
    default=1,
    metavar="SECONDS",
    help="How long each workload runs before the measurement.",
)
@_option("--keys", type=WholeNumber(1, 1_000), default=_DEFAULTS.keys, metavar="N", help="Number of keys of mixed.")
@_option(
    "--shared",
    "shared_percent",
    type=WholeNumber(0, 100),
    default=_DEFAULTS.shared_percent,
    metavar="PERCENT",
    help="Percentage of shared requests of mixed.",
)
@_option(
    "--resources",
    type=WholeNumber(1, 100),
    default=_DEFAULTS.resources,
    metavar="N",
    help="Number of keys in each request of several.",
)
@_option(
    "--profile",
    metavar="FILE|NAME",
    help=f"Run the phases of a load profile instead of workloads: a TOML file, or one of {_NAMES}.",
)
@json_option
@server_query
def bench(
    server: QueriedServer,
    workloads: tuple[str, ...],
    profile: str | None,
    keys: int,
    shared_percent: int,
    resources: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the throughput and the latency of a running server.

    \b
    Workloads, run one after the other; by default all:
      own      each request locks a key of its own
      hot      all requests lock the same key
      mixed    requests lock one of a few keys, most of them shared
      several  each request locks several keys of its own

    A cycle is a request, its grant, its release and the reply. A connection starts the next cycle when one is
    completed (closed loop), so a slow server receives fewer requests. Latencies are measured from sending the request
    to reading `locked`, and to reading `released`. They are rounded up by at most 1 %.

    One process generates the load and reads the replies. Give it a CPU of its own (taskset -c 1 genie bench). If it
    uses a whole CPU ("client CPU"), it limits the throughput and adds to the latencies: run several processes at once.
    If neither it nor the server is busy, increase --connections or --depth.

    The first lines say whether the server and this client are compiled, and whether their interpreters are optimized.

    The names of the keys start with a random prefix, so no other client waits for them. All locks are released at the
    end, also after Ctrl-C, which ends the benchmark early and prints the results so far.

    Releases that could not be confirmed are counted as `not-released`; the server releases these locks when the
    connections end.

    \b
    Errors are counted over the whole run with its warm-up, by the error code or
    the reason that the server sent. These names are not the server's:
      connection-lost    a connection ended; the others continue
      not-released       the end of a request was not confirmed within
                         --timeout, or before a second Ctrl-C
      protocol-error     a connection received invalid data and was closed
      released-by-other  a request was ended by another client

    The number of connections is shown next to the rate if some were not open for the whole measured time.

    Exit status: 0; 1 if there were errors, or if a workload could not be measured; 130 after Ctrl-C. A workload that
    is interrupted while it warms up has no result.
    """  # noqa: D301 - click needs the backspace character before a paragraph that must not be rewrapped
    if profile is not None:
        _reject_load_options(workloads)
        _run_profile(profile, server, as_json=as_json)
        return
    if options["connections"] * options["depth"] > MAX_IN_FLIGHT:
        raise click.UsageError(f"--connections times --depth must be at most {MAX_IN_FLIGHT:,}.")
    parameters = WorkloadParameters(keys=keys, shared_percent=shared_percent, resources=resources)
    address, build_of_server = server.query(_query_leader)
    bench_options = BenchOptions(
        address=address, namespace=server.namespace, timeout_s=server.timeout_s, parameters=parameters, **options
    )
    unique_workloads = list(dict.fromkeys(workloads))
    benchmark = _Benchmark(
        bench_options, build_of_server, workloads=unique_workloads or list(WORKLOADS), as_json=as_json
    )
    run_on_uvloop(benchmark.run())
    benchmark.finish()


async def _query_leader(client: Querier) -> tuple[Address, str]:
    """Return the address of the leader, and its version and build."""
    await client.ping()  # follows redirects, so the client is now connected to the leader
    if client.address is None:
        raise Unavailable("the connection to the server was lost")
    return client.address, client.server


@dataclass(slots=True)
class _Benchmark:
    """Runs workloads one after the other, and prints their results."""

    options: BenchOptions
    server: str
    """Version and build of the server."""
    workloads: list[str]
    """The names of the workloads to run."""
    as_json: bool
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False
    """True after Ctrl-C."""
    failure: GenieError | None = None
    """Why a workload could not be measured to its end, after which no other workload runs."""

    async def run(self) -> None:
        """Run the workloads in order, and stop after an interrupt or a failure, which `finish` reports."""
        on_terminal = sys.stderr.isatty()
        runner = LoadRunner(self.options, on_progress=_show_progress if on_terminal else lambda *_: None)
        # In a background job of a shell script, SIGINT is ignored. Then the benchmark ignores it, too.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, runner.interrupt)
        if not self.as_json:
            print_lines(*header_lines(self.options, self.server))
        for workload in self.workloads:
            try:
                result = await runner.run(workload)
            except GenieError as error:
                self.failure = error
                return
            finally:
                if on_terminal:
                    _write_progress("")
            self._add_result(result)
            self.interrupted = runner.interrupt_count > 0
            if self.interrupted or self.failure is not None:
                return

    def _add_result(self, result: Result) -> None:
        """Record and print the result of a workload. Set `failure` if the workload has lost all its connections."""
        if result.measured_s:  # 0 if the workload ended during its warm-up
            self.results.append(result)
            if not self.as_json:
                print_lines(*result_lines(result, self.options))
        if result.connection_error:
            self.failure = ConnectionLost(
                f"lost all connections to {format_address(self.options.address)}: {result.connection_error}"
            )

    def finish(self) -> None:
        """Print the JSON document if it is requested, and raise an error if the benchmark was not successful.

        Raises:
            GenieError: the failure that ended the benchmark, or Unavailable if a workload has completed no cycle.
            SystemExit: after Ctrl-C.
            ClickException: if errors were counted.

        """
        if self.as_json:
            print_json(
                codec.dumps(json_document(self.options, self.server, self.results, interrupted=self.interrupted))
            )
        if self.failure is not None:
            raise self.failure
        if self.interrupted:
            raise SystemExit(INTERRUPTED)
        without_cycles = [result.workload for result in self.results if not result.cycles]
        if without_cycles:
            raise Unavailable(f"no result for {', '.join(without_cycles)}: no cycle completed in the measured time")
        errors = [
            f"{result.workload}: {_format_errors(result.tally.errors)}"
            for result in self.results
            if result.tally.errors
        ]
        if errors:
            raise click.ClickException(f"errors occurred: {'; '.join(errors)}")


# -- `genie bench --profile` --------

PHASE_HEADERS = ("PHASE", "RATE/S", "P50", "P99", "TIMEOUTS", "DEADLOCKS", "UNFINISHED", "DROPPED", "ERRORS")
LOAD_OPTIONS = frozenset({"connections", "depth", "measure_s", "warm_up_s", "keys", "shared_percent", "resources"})
"""The options that define the load of the workloads. A profile defines its load itself."""


def _reject_load_options(workloads: tuple[str, ...]) -> None:
    """Raise a usage error if workloads, or options that define their load, were given together with `--profile`."""
    context = click.get_current_context()
    given = [f"the workload {workloads[0]}"] if workloads else []
    given += [
        param.opts[0]
        for param in context.command.params
        if param.name in LOAD_OPTIONS and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"--profile cannot be combined with {', '.join(given)}: the profile states the load.")


def _run_profile(profile: str, server: QueriedServer, *, as_json: bool) -> None:
    """Run a load profile, and print a row for each phase, or a JSON document.

    `profile` is a file or the name of a built-in profile. Raises ClickException if a request has ended with an error other
    than a timeout or a deadlock.
    """
    try:
        phases = load(profile)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    results: list[PhaseResult] = []
    interrupted = False
    try:
        run_on_uvloop(_run_phases(phases, server, results))
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        rows = [_json_phase(result) for result in results]
        print_json(codec.dumps({"profile": profile, "interrupted": interrupted, "phases": rows}))
    else:
        rows_of_text = [_phase_row(result) for result in results]
        print_lines(*table(PHASE_HEADERS, rows_of_text, right_aligned=range(1, len(PHASE_HEADERS))))
    if interrupted:
        raise SystemExit(INTERRUPTED)
    errors = [f"{result.phase.name}: {_format_errors(result.errors)}" for result in results if result.errors]
    if errors:
        raise click.ClickException(f"errors occurred: {'; '.join(errors)}")


async def _run_phases(phases: Iterable[Phase], server: QueriedServer, results: list[PhaseResult]) -> None:
    """Run the phases of a profile in order. Appends each result to `results`, which has them also after an interrupt."""

    def connect() -> aio.Client:
        return aio.connect(
            server.host,
            server.port,
            namespace=server.namespace,
            connect_timeout=server.timeout_s,
            response_timeout=server.timeout_s,
        )

    for phase in phases:
        results.append(await run_phase(phase, connect))  # noqa: PERF401 - see the docstring


def _phase_row(result: PhaseResult) -> list[str]:
    """Return the table cells of a phase, in the order of `PHASE_HEADERS`."""
    latencies = [_format_ns(result.to_locked.quantile_ns(QUANTILES[name])) for name in ("p50", "p99")]
    counts = (result.timeouts, result.deadlocks, result.unfinished, result.dropped, result.errors.total())
    return [result.phase.name, f"{result.per_s:,.0f}", *latencies, *(f"{count:,}" for count in counts)]


def _json_phase(result: PhaseResult) -> dict[str, Any]:
    """Return the JSON object of a phase."""
    return {
        "phase": result.phase.name,
        "settings": asdict(result.phase),
        "measured_s": round(result.measured_s, 6),
        "completed": result.completed,
        "per_s": round(result.per_s, 1),
        "to_locked": _json_latencies(result.to_locked),
        "timeouts": result.timeouts,
        "deadlocks": result.deadlocks,
        "unfinished": result.unfinished,
        "dropped": result.dropped,
        "errors": dict(result.errors),
    }
