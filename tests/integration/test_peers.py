"""The benchmark beside other lock servers runs: real servers are started, measured and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.genie_server import GenieClient, GenieMemory
from benchmarks.peers.measure import SHAPES, measure
from benchmarks.peers.peer import LibraryPeer, PeerFailed, WirePeer
from benchmarks.peers.processes import accepts, serving
from benchmarks.peers.redis_set import RedisSet
from support.processes.servers import WAIT_S

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark needs Linux")


@pytest.mark.parametrize("peer", [GenieMemory(), RedisSet(), GenieClient()], ids=lambda peer: peer.slug)
def test_a_peer_is_measured_and_its_servers_end(peer: WirePeer | LibraryPeer, tmp_path: Path) -> None:
    assert peer.missing() is None
    with peer.running(tmp_path, ()) as running:
        for shape in SHAPES:
            sample = measure(peer, running, shape, seconds=0.4, warmup=0.05)
            assert sample.cycles > 0
            assert sample.errors == 0
            assert 0 < sample.p50_us <= sample.p99_us
            assert sample.least <= sample.most
    programs = ["Genie", "Redis"] if isinstance(peer, GenieClient) else [peer.name.split(",")[0]]
    assert [version.split()[0] for version in running.versions] == programs
    with pytest.raises(OSError):  # noqa: PT011 - whichever: nobody listens
        accepts(running.port)
    assert not any(Path(f"/proc/{pid}").exists() for pid in running.pids)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    def refuses() -> None:
        raise ConnectionRefusedError

    command = [sys.executable, "-c", "import sys; sys.exit('no, thank you')"]
    with pytest.raises(PeerFailed, match="no, thank you"), serving(command, tmp_path / "log", refuses):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("slug", ["redis-set", "genie-client"])
def test_a_signal_ends_it_with_its_servers_and_leaves_nothing(
    slug: str, number: signal.Signals, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers", "--only", slug, "--rounds", "50", "--seconds", "0.5"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        while "cycles/s" not in process.stdout.readline():
            assert process.poll() is None
        if slug == "redis-set":
            os.killpg(process.pid, number)  # Ctrl-C is for the servers, too
        else:  # a Genie whose Redis has also ended would try to resign for seconds
            process.send_signal(number)
        _, said = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, said) == (128 + number, "stopped\n")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
