"""Mutation tests of the comparison with the theory of all kinds of locks. `test_lock_kinds.py` must detect each defect.

    PYTHONPATH=tests python tests/unit/core/mutants.py [NAME...]

The defects of the fast paths are in `tests/simulation/mutants.py`, because only a server takes them.
"""

from __future__ import annotations

import subprocess
import sys

from conformance.mutation import ROOT, Mutant, environment, main, mutated

MUTANTS = [
    Mutant(
        "units of earlier waiters are not counted",
        "core/grant.py",
        "request.units[name], queue, entry)",
        "request.units[name])",
    ),
    Mutant(
        "the units that a request asks for are not counted",
        "core/grant.py",
        "    units, limit = asked\n",
        "    units, limit = 0, asked[1]\n",
    ),
    Mutant(
        "a deadlock with units of the own transaction is not detected",
        "core/reduction.py",
        "            self.asked[waiter.owner] = units + other_units, min(limit, other_limit)",
        "            self.asked[waiter.owner] = max(units, other_units), min(limit, other_limit)",
    ),
    Mutant(
        "the limit of the other request is used",
        "core/wait_queue.py",
        "        smallest = min(smallest, limit)\n",
        "        smallest = limit\n",
    ),
    Mutant(
        "the limits of earlier waiters are ignored",
        "core/wait_queue.py",
        "        smallest = min(smallest, limit)\n",
        "",
    ),
    Mutant(
        "intentions are not given to new requests",
        "core/lock_table.py",
        "        if changed:\n            if request.details is None:",
        "        if False:\n            if request.details is None:",
    ),
    Mutant(
        "intentions are kept after the subtree",
        "core/subtrees.py",
        "    del waiter.details.queue_modes[subtree]\n",
        "",
    ),
    Mutant(
        "the first waiter of a subtree is granted without a check",
        "core/grant.py",
        "    if resource.special is not None or first is None:\n",
        "    if first is None:\n",
    ),
    Mutant(
        "a waiter below a subtree is granted without a check",
        "core/lock_table.py",
        "        request.simple = request.transaction is None and len(queues) == 1\n",
        "        request.simple = request.transaction is None and request.name_count() == 1\n",
    ),
    Mutant(
        "the reduction in queue order ignores the queues",
        "core/reduction.py",
        "        return self._reduce(in_order, self._blockers_in_order())",
        "        return self._reduce({name: _HeldOnly(examined) for name, examined in self._examined.items()}, {})",
    ),
    Mutant(
        "a follower drops the positions in the queue of a subtree",
        "core/subtrees.py",
        "    if queue is not None and not keep_moved:",
        "    if queue is not None:",
    ),
]

RUN = """
from unit.core import test_lock_kinds as tests
print("none", flush=True)
for earlier, later in ((1, 4), (2, 2)), ((1, 2), (2, 4)):
    tests.test_a_later_request_must_fit_into_its_own_limit_and_into_that_of_an_earlier_one(earlier, later)
for seed in range(tests.SEEDS):
    print(seed, flush=True)
    tests.run(seed, tests.STEPS)
    if seed < tests.LONG_SEEDS:
        tests.test_a_follower_has_the_state_of_the_leader_after_each_batch(seed)
"""


def detect(mutant: Mutant) -> str:
    """Compare with the theory, seed by seed; return the first seed that reveals the mutant, or "" if it survives."""
    with mutated(mutant, "genie", "simulator") as folder:
        process = subprocess.run(
            [sys.executable, "-c", RUN],
            cwd=folder,
            env=environment(folder) | {"PYTHONPATH": f"{folder}:{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode == 0:
            return ""
        return f"seed {process.stdout.split()[-1]}: {process.stderr.strip().splitlines()[-1][:110]}"


if __name__ == "__main__":
    sys.exit(main(MUTANTS, detect, __doc__))
