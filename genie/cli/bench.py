"""What `genie bench` shows: a line while it runs, a table for people, rows for programs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import click

from genie.bench.generator import WORKLOADS, Shape
from genie.bench.histogram import Histogram
from genie.bench.runner import BenchOptions, LoadRunner, Result
from genie.cli.format import table
from genie.cli.options import (
    INTERRUPTED,
    Querier,
    WholeNumber,
    json_option,
    one_line_errors,
    query,
    seconds,
    server_options,
    timeout_option,
)
from genie.client.config import Address, format_address
from genie.errors import ConnectionLost, GenieError, Unavailable
from genie.protocol import codec

BUSY_PERCENT = 90
"""As it is shown. From here on the client itself is taken for what limits the result."""
QUANTILES = {"p50": 500, "p99": 990, "p99_9": 999}
"""Those that are told, by their names in JSON, in thousandths."""
HEADERS = ("FROM REQUEST TO", "P50", "P99", "P99.9", "MAX")
NUMBERS = range(1, len(HEADERS))

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
MIN_MS_DISPLAY_NS = 999_500
"""Shorter times are shown in µs. This one, rounded to them, would have four digits."""
CLEAR_LINE = "\r\x1b[K"


def show_progress(workload: str, past_s: float | None, cycles: int) -> None:
    """Write over the line on stderr, which must be a terminal. `past_s` None: it warms up."""
    how_far = "warming up" if past_s is None else f"{past_s:.1f} s, {cycles / past_s:,.0f} cycles/s"
    sys.stderr.write(f"{CLEAR_LINE}{workload}: {how_far}")
    sys.stderr.flush()


def end_progress() -> None:
    """Take the line away."""
    sys.stderr.write(CLEAR_LINE)
    sys.stderr.flush()


def headline(plan: BenchOptions) -> str:
    """What is asked, and how."""
    each = "1 request" if plan.depth == 1 else f"{plan.depth:,} requests"
    return f"{format_address(plan.address)}, connections: {plan.connections:,}, in flight on each: {each}"


def errors(result: Result) -> str:
    """What went wrong, and how often."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(result.tally.errors.items())) or "none"


def lines(result: Result, plan: BenchOptions) -> list[str]:
    """A workload's result for people."""
    tally = result.tally
    busy = round(result.client_cpu_percent)
    rate = f"{result.cycles_per_s:,.0f} cycles/s ({result.cycles:,} in {result.measured_s:.1f} s)"
    fewer = ""
    if result.connections < plan.connections:
        fewer = f", connections: {result.connections:,} of {plan.connections:,}"
    limit = ": the client is the bottleneck" if busy >= BUSY_PERCENT else ""
    found = [
        f"{result.workload}: {WORKLOADS[result.workload].title(plan.shape)}",
        f"{rate}{fewer}, errors: {errors(result)}, client CPU: {busy} %{limit}",
    ]
    rows = [
        [name, *(_time(ns) for ns in (*_quantiles(histogram), histogram.max_ns))]
        for name, histogram in (("locked", tally.to_locked), ("released", tally.to_released))
        if histogram.count
    ]
    if rows:
        found += table(HEADERS, rows, right=NUMBERS)
    return [found[0], *("  " + line for line in found[1:])]


def document(plan: BenchOptions, results: list[Result], *, interrupted: bool) -> dict[str, Any]:
    """Everything for programs; units are last in the names."""
    return {
        "address": format_address(plan.address),
        "settings": {
            "connections": plan.connections,
            "depth": plan.depth,
            "measure_s": plan.measure_s,
            "warm_up_s": plan.warm_up_s,
            **asdict(plan.shape),
        },
        "interrupted": interrupted,
        "workloads": [_row(result) for result in results],
    }


def _row(result: Result) -> dict[str, Any]:
    return {
        "workload": result.workload,
        "connections": result.connections,
        "measured_s": round(result.measured_s, 6),
        "cycles": result.cycles,
        "cycles_per_s": round(result.cycles_per_s, 1),
        "client_cpu_percent": round(result.client_cpu_percent, 1),
        "to_locked": _times(result.tally.to_locked),
        "to_released": _times(result.tally.to_released),
        "errors": dict(result.tally.errors),
    }


def _times(histogram: Histogram) -> dict[str, float | None]:
    found = {f"{name}_us": ns for name, ns in zip(QUANTILES, _quantiles(histogram), strict=True)}
    found["max_us"] = histogram.max_ns if histogram.count else None
    return {name: None if ns is None else round(ns / NS_PER_US, 1) for name, ns in found.items()}


def _quantiles(histogram: Histogram) -> list[int | None]:
    return [histogram.quantile_ns(per_mille) for per_mille in QUANTILES.values()]


def _time(ns: int | None) -> str:
    if ns is None:
        return ""
    return f"{ns / NS_PER_US:.0f} µs" if ns < MIN_MS_DISPLAY_NS else f"{ns / NS_PER_MS:.2f} ms"


# -- `genie bench` --------

MAX_IN_FLIGHT = 1_000_000


@click.command()
@click.argument("workloads", nargs=-1, type=click.Choice(list(WORKLOADS)), metavar="[WORKLOAD]...")
@click.option(
    "--connections",
    type=WholeNumber(1, 20_000),
    default=64,
    show_default=True,
    metavar="N",
    help="Connections to the server.",
)
@click.option(
    "--depth",
    type=WholeNumber(1, 10_000),
    default=1,
    show_default=True,
    metavar="N",
    help="Requests in flight on each connection.",
)
@click.option(
    "--seconds",
    "measure_s",
    type=seconds(0.001),
    default=5,
    show_default=True,
    metavar="SECONDS",
    help="How long each workload is measured.",
)
@click.option(
    "--warm-up",
    "warm_up_s",
    type=seconds(0),
    default=1,
    show_default=True,
    metavar="SECONDS",
    help="How long each workload runs before that.",
)
@click.option(
    "--keys",
    type=WholeNumber(1, 1_000),
    default=Shape().keys,
    show_default=True,
    metavar="N",
    help="Keys of mixed.",
)
@click.option(
    "--shared",
    "shared_percent",
    type=WholeNumber(0, 100),
    default=Shape().shared_percent,
    show_default=True,
    metavar="PERCENT",
    help="How many of the requests of mixed are shared.",
)
@click.option(
    "--resources",
    type=WholeNumber(1, 100),
    default=Shape().resources,
    show_default=True,
    metavar="N",
    help="Keys in each request of several.",
)
@json_option
@server_options
@timeout_option
@one_line_errors
def bench(
    workloads: tuple[str, ...],
    keys: int,
    shared_percent: int,
    resources: int,
    as_json: bool,
    host: str,
    port: int,
    namespace: str | None,
    timeout: float,
    **options: Any,
) -> None:
    """Measure how many locks a running server gives and takes back in a second, and how long that takes.

    \b
    Each WORKLOAD is run by itself; without any, all are:
      own      each request locks a key of its own
      hot      all requests lock the same key
      mixed    requests lock one of a few keys, most of them shared
      several  each request locks several keys of its own

    A cycle is a request, its grant, its release and the answer to that. Then the next begins: a slow server is asked
    less. Times count from sending the request until `locked`, and until `released`, is read. They are at most 1 % too
    long.

    One process makes the load and reads the answers. Give it a processor of its own (taskset -c 1 genie bench). Where
    it uses all of one ("client CPU") the server may do more than is shown, and the times are partly its own: run
    several at once. Where neither it nor the server is busy, add --connections or --depth, and repeat.

    The keys begin with a random name, so nobody else waits for them. All is released in the end, also after Ctrl-C,
    which ends it early with what was measured until then.

    What could not be confirmed is counted as `not-released`; the server releases it when the connection ends.

    \b
    Errors are those of the whole run, also of the warm-up, by the code or the
    reason that the server gives. These names are not the server's:
      connection-lost            a connection ended; the others go on
      no-message                 something came that no Genie server sends;
                                 that connection is cut
      not-released               that a request has ended was not confirmed
                                 within --timeout, or before a second Ctrl-C
      released-by-other  a request was ended, but not by this command

    Connections are counted behind the rate where not all were there for all of the measured time.

    Exit status: 0; 1 where any error was counted, or a workload could not be measured; 130 after Ctrl-C, which leaves
    out a workload that still warms up.
    """  # noqa: D301 - click wants the character itself before a text that must keep its lines
    if options["connections"] * options["depth"] > MAX_IN_FLIGHT:
        raise click.UsageError(f"--connections times --depth may be {MAX_IN_FLIGHT:,} at most.")
    shape = Shape(keys=keys, shared_percent=shared_percent, resources=resources)
    plan = BenchOptions(
        address=query(host, port, namespace, timeout, _address),
        namespace=namespace,
        timeout_s=timeout,
        shape=shape,
        **options,
    )
    names = list(dict.fromkeys(workloads)) or list(WORKLOADS)
    session = _Session(plan, names, as_json)
    _run(session.run())
    session.finish()


async def _address(client: Querier) -> Address:
    """The server that leads; all connections go there."""
    await client.ping()
    if client.address is None:
        raise Unavailable("the connection to the server was lost")
    return client.address


def _print(text: str | bytes) -> None:
    try:
        click.echo(text)
    except BrokenPipeError:
        raise  # click ends quietly then
    except OSError as error:
        with suppress(OSError):  # what could not be written is not tried again at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.ClickException(f"cannot write the result: {error.strerror}") from None


def _run(session: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        asyncio.run(session)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(session)


@dataclass(slots=True)
class _Session:
    """One call of the command: what it runs, and what has come of it so far."""

    plan: BenchOptions
    names: list[str]
    as_json: bool
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False
    failure: GenieError | None = None

    async def run(self) -> None:
        """Run the workloads until something ends it."""
        shown = sys.stderr.isatty()
        load = LoadRunner(self.plan, show_progress if shown else lambda *_: None)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as behind `&` in a script
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, load.interrupt)
        if not self.as_json:
            _print(headline(self.plan))
        for name in self.names:
            try:
                result = await load.run(name)
            except GenieError as error:
                self.failure = error
                return
            finally:
                if shown:
                    end_progress()
            self._take(result)
            self.interrupted = load.interrupts > 0
            if self.interrupted or self.failure is not None:
                return

    def _take(self, result: Result) -> None:
        if result.measured_s:
            self.results.append(result)
            if not self.as_json:
                _print("\n".join(lines(result, self.plan)))
        if result.lost:
            self.failure = ConnectionLost(f"lost all connections to {format_address(self.plan.address)}: {result.lost}")

    def finish(self) -> None:
        """Print what is printed last, and end with the status that says how it went."""
        if self.as_json:
            _print(codec.dumps(document(self.plan, self.results, interrupted=self.interrupted)))
        if self.failure is not None:
            raise self.failure
        if self.interrupted:
            raise SystemExit(INTERRUPTED)
        idle = [result.workload for result in self.results if not result.cycles]
        if idle:
            raise Unavailable(f"no result for {', '.join(idle)}: no cycle completed in the measured time")
        wrong = [f"{result.workload}: {errors(result)}" for result in self.results if result.tally.errors]
        if wrong:
            raise click.ClickException(f"errors occurred: {'; '.join(wrong)}")
