"""Selections of eight replicas with Genie, each from its own wallet or all from one."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

from scale_parts.processes import genie
from scale_parts.report import Row, medians, progress, ratio

from tokens_parts.replica import SHARED, TOKENS, WALLET, Done, Work, replica

REPLICAS = 8
ROUNDS = 7
SECONDS = 1.5
RATE = 3_000
CONTENDED = 0.9


class Replicas:
    """The replicas, which execute the same request at the same time."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def work(self, way: str, shared: bool) -> Done:
        """Execute a request in all replicas; return the sum of their results. `seconds` is the
        longest duration.
        """
        progress(f"{way}, {'one wallet for all' if shared else 'a wallet for each'}")
        for number, pipe in enumerate(self._pipes):
            pipe.send(Work(way, SHARED if shared else f"own-{number}", SECONDS))
        done = [pipe.recv() for pipe in self._pipes]
        return Done(
            sum(one.selections for one in done),
            sum(one.collisions for one in done),
            sum(one.failed for one in done),
            max(one.seconds for one in done),
            sum(one.cpu_s for one in done),
        )


@contextmanager
def _running() -> Iterator[Replicas]:
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack, genie() as server:
        pipes = []
        for number in range(REPLICAS):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=replica, args=(number, server.port, [f"own-{number}", SHARED], theirs))
            process.start()
            stack.callback(process.kill)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        yield Replicas(pipes)
        for pipe in pipes:
            pipe.send(None)


def replicas() -> Iterator[Row]:
    """Eight replicas in separate processes, each with four concurrent selections of five tokens, one server."""
    kinds = [("sherdlock", False), ("sherdlock", True), ("one by one", False), ("one by one", True)]
    with _running() as running:
        results: list[list[Done]] = [[] for _ in kinds]
        for number in range(-1, ROUNDS):
            order = range(len(kinds)) if number % 2 == 0 else reversed(range(len(kinds)))
            for place in order:
                done = running.work(*kinds[place])
                if number >= 0:  # the first time is never like the others
                    results[place].append(done)
    rates = [[done.selections / done.seconds for done in one] for one in results]
    own, one, classic_own, classic_one = rates
    yield Row(f"selections of {TOKENS} tokens, a wallet for each", statistics.median(own), "/s", RATE, True, 0)
    cpu_us = statistics.median(1e6 * done.cpu_s / max(1, done.selections) for done in results[0])
    yield Row("CPU of the replicas for each of them", cpu_us, "us", digits=0)
    yield Row(
        f"one wallet of {WALLET:,} for all: the same, beside a wallet for each",
        ratio(one, own),
        "",
        CONTENDED,
        True,
        note=f"{medians('selections/s', one, own)}; {_collisions(results[1])}",
    )
    yield Row(
        "token by token, without waiting: selections beside these, a wallet for each",
        ratio(classic_own, own),
        note=medians("selections/s", classic_own, own),
    )
    yield Row(
        "token by token: one wallet for all, beside a wallet for each",
        ratio(classic_one, classic_own),
        note=f"{medians('selections/s', classic_one, classic_own)}; {_collisions(results[3])}",
    )


def _collisions(results: list[Done]) -> str:
    selections = sum(done.selections for done in results)
    collisions, failed = sum(done.collisions for done in results), sum(done.failed for done in results)
    return f"{1000 * collisions / max(1, selections):.1f} collisions in 1,000 selections, {failed:,} failed"
