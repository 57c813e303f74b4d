"""The load with several requests in flight on each connection: one thread, epoll, and one write for each read."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from benchmarks.peers.counting import Count
from benchmarks.peers.figures import Sample
from benchmarks.peers.peer import PeerFailed, Pipeline, Running, Step

STALLED_S = 15.0
"""Timeout without any received byte."""
READ_BYTES = 1 << 18


def drive_pipelines(pipelines: Sequence[Pipeline], running: Running, depth: int, seconds: float) -> Sample:
    """Execute cycles for some time; the last cycles are completed. PeerFailed if a reply is wrong or missing."""
    by_fd = {pipeline.sock.fileno(): pipeline for pipeline in pipelines}
    began = [[0.0] * depth for _ in pipelines]
    count = Count(running, len(pipelines))
    under_way, sample = len(pipelines) * depth, None
    with select.epoll() as poller:
        for fd, pipeline in by_fd.items():
            poller.register(fd, select.EPOLLIN)
            began[pipeline.number] = [time.perf_counter()] * depth
            pipeline.sock.sendall(b"".join([pipeline.lock(key) for key in range(depth)]))
        end = time.perf_counter() + seconds
        while under_way:
            now = time.perf_counter()
            if now >= end and sample is None:
                sample = count.sample()
            ready = poller.poll(STALLED_S)
            if not ready:
                raise PeerFailed(f"nothing came for {STALLED_S:.0f} s")
            for fd, _ in ready:
                under_way -= _answer(by_fd[fd], began[by_fd[fd].number], count, over=sample is not None)
    return sample or count.sample()


def _answer(pipeline: Pipeline, began: list[float], count: Count, *, over: bool) -> int:
    """Read and answer what has arrived. Return the number of keys whose last cycle has ended."""
    data = pipeline.sock.recv(READ_BYTES)
    if not data:
        raise PeerFailed("closed a connection")
    commands: list[bytes] = []
    now, ended = time.perf_counter(), 0
    for key, step in pipeline.read(data):
        if step is Step.LOCKED:
            commands.append(pipeline.unlock(key))
        elif step is not Step.UNLOCKED:
            raise PeerFailed(f"a request was answered with {step.name}")
        elif over:
            ended += 1
        else:
            count.cycle(pipeline.number, now - began[key])
            began[key] = now
            commands.append(pipeline.lock(key))
    if commands:
        pipeline.sock.sendall(b"".join(commands))
    return ended
