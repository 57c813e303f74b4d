"""Worlds from seeds: whatever happens in them, nothing goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from genie.testing.simulation.scenario import CHOOSING, FEATURED, REPLICATED
from genie.testing.simulation.soak import run

COUNT = 30
CHOOSERS = 10
"""Worlds in addition, in which clients also take any of several."""
REPLICATORS = 14
"""Worlds in addition, with three Redises and sentinels. `make soak-worlds` runs hundreds of each kind."""
FEATURERS = 20
"""Worlds in addition, whose clients use bye, quiet, notes and release by ref."""
PROCESSES = 2

KEPT = [
    55,  # another took the lead while a follower read the records for the first time
    81,  # Redis lost everything again while the state was written anew
    112,  # Redis went back to where a server had once written it anew, and that was taken for done
    114,  # the only server stood down while Redis was away, and Redis had lost writes when it came back
    118,  # Redis lost writes, was written anew, and lost writes again
    278,  # a follower was told to stop in the moment in which a reply came
    389,  # a dead client had left something waiting, with a session that outlived the faults
    429,  # Redis lost writes, and in the next moment the leader died
    692,  # as 81
    3549,  # reading the records was broken off, and the old replica was fed what came behind the gap
    1235,  # somebody led a new namespace between two looks of who waited for it, and Redis lost everything again
    2000118,  # what was written anew counted as stored before a replica had it
    2000603,  # the leader stood down while Redis was away, and a follower that knew less wrote it anew
    2000662,  # a client was told of its request by another id, for what it knew was on a way that did not last
    2000811,  # what a client heard on a lost way was taken for an answer on the way that lasted
    2001149,  # a server that had just come led before those who had seen more than Redis had
    2002425,  # all died who had seen what Redis lost
    2005639,  # the answer to a take-over was lost, and the next one took it for a leader who had gone on
    2006156,  # a batch that was told to nobody had another Redis taken for another way
    2007094,  # what too few replicas had was left out of what was written anew, as it may be
    2030361,  # a deadlock went through a request that was granted and released in one batch
    2031059,  # a node that stood by at an old master which held nothing led there
    2080201,  # a node forgot what it was about to write anew, for it had just read what Redis had
    2090143,  # a node that had led did not show how far it had come, and one that knew less led
    2080591,  # a node went on without its batch in flight, which a Redis had that was left: nobody was told of it
    2012994,  # the last words to sessions were not written anew: they went with the connections of who had led
    5423,  # a leader resigned from a Redis that lacked what it had told
    3000046,  # a store that lost writes, with all who knew of them, brought a session back that had ended by bye
    3000158,  # a server led again, and had forgotten a request that was refused at once: its ref made another one
    778,  # a follower that had to read the records did not see that another led by then
]
"""Seeds that have shown something once, and what that was."""

SAME = """
from genie.testing.simulation.soak import run
for seed in (17, 2000012):
    print(run(seed)[0].history.digest())
"""


def problems(seed: int) -> tuple[int, list[str]]:
    """What goes wrong in a world."""
    return seed, run(seed)[1]


def test_every_world_goes_well() -> None:
    more = *range(CHOOSING, CHOOSING + CHOOSERS), *range(REPLICATED, REPLICATED + REPLICATORS)
    more += (*range(FEATURED, FEATURED + FEATURERS),)
    seeds = sorted({*range(1, COUNT + 1), *KEPT, *more})
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        failed = [(seed, found) for seed, found in pool.map(problems, seeds, chunksize=5) if found]
    told = "\n".join(f"python -m genie.testing.simulation.soak --seed {seed}: {found[0]}" for seed, found in failed)
    assert not failed, f"{len(failed)} of {len(seeds)} worlds went wrong:\n{told}"


def test_a_seed_gives_the_same_history_in_every_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", SAME],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_seed_gives_the_same_history_each_time() -> None:
    """Also where what is asked of several at once is answered by several at once, and a set has no order."""
    assert len({run(REPLICATED + 48)[0].history.digest() for _ in range(4)}) == 1
