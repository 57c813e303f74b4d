"""The loads, and the measurement of one peer under one of them.

A cycle begins with the request of the lock and ends with the reply to the unlock; it includes
waiting in a queue and retries. A lock is held only until the unlock is sent. Each connection begins
its next cycle when one has ended.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.figures import Sample
from benchmarks.peers.library import drive_library
from benchmarks.peers.peer import LibraryPeer, Peer, PeerFailed, Pipeline, Running, Wire, WirePeer
from benchmarks.peers.pipelines import drive_pipelines
from benchmarks.peers.stopping import run
from benchmarks.peers.wires import Drive


@dataclass(frozen=True)
class Shape:
    """A kind of load."""

    slug: str
    title: str
    connections: int
    """Number of connections, or of tasks of a client library."""
    hot: bool
    """True if all connections lock the same key."""
    depth: int = 1
    """Number of requests in flight on each connection, or of tasks for each connection."""

    @property
    def keys(self) -> Sequence[str]:
        """Return the key of each connection; with several requests in flight, all keys of a connection in a row."""
        if self.depth > 1:
            return [f"accounts/{number}/{slot}" for number in range(self.connections) for slot in range(self.depth)]
        return ["hot" if self.hot else f"accounts/{number}" for number in range(self.connections)]


SHAPES = (
    Shape("own", "64 connections or tasks, a key for each", 64, hot=False),
    Shape("hot", "64 connections or tasks, one key for all", 64, hot=True),
    Shape("one", "One connection", 1, hot=False),
    Shape("deep", "64 connections, 16 requests in flight on each", 64, hot=False, depth=16),
)


def measure(peer: Peer, running: Running, shape: Shape, seconds: float, warmup: float) -> Sample:
    """Measure one peer under one load. PeerFailed if it does not reply."""
    try:
        if isinstance(peer, LibraryPeer):
            return run(lambda: drive_library(peer, running, shape.keys[:: peer.batch], seconds, warmup))
        if isinstance(peer, WirePeer) and shape.depth > 1:
            return _pipelines(peer, running, shape, seconds, warmup)
        if isinstance(peer, WirePeer):
            return _wires(peer, running, shape.keys, seconds, warmup)
    except (OSError, ValueError) as error:
        raise PeerFailed(f"{type(error).__name__}: {error}") from error
    raise TypeError(peer)


def _wires(peer: WirePeer, running: Running, keys: Sequence[str], seconds: float, warmup: float) -> Sample:
    wires: list[Wire] = []
    gc.collect()
    gc.disable()
    try:
        for number, key in enumerate(keys):
            wires.append(peer.connect(running, key, number))
            wires[-1].sock.setblocking(False)
        Drive(wires, running).run(warmup)
        return Drive(wires, running).run(seconds)
    finally:
        gc.enable()
        for wire in wires:
            wire.sock.close()


def _pipelines(peer: WirePeer, running: Running, shape: Shape, seconds: float, warmup: float) -> Sample:
    keys, depth = shape.keys, shape.depth
    pipelines: list[Pipeline] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(shape.connections):
            own_keys = keys[number * depth : (number + 1) * depth]
            pipelines.append(peer.pipeline(running, own_keys, number))
            pipelines[-1].sock.setblocking(True)
        drive_pipelines(pipelines, running, depth, warmup)
        return drive_pipelines(pipelines, running, depth, seconds)
    finally:
        gc.enable()
        for pipeline in pipelines:
            pipeline.sock.close()
