"""Runs all fuzzers, one after the other, until one fails: `python -m fuzz` (with tests/ on the path)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from random import Random

SHARES = (("codec", "--runs", 0.5), ("server", "--lines", 0.48), ("wire", "--lines", 0.02))
"""The fuzzers, the option for the number of inputs, and the share of the inputs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--inputs", type=int, default=1_000_000, help="number of inputs of all fuzzers together (default: a million)"
    )
    parser.add_argument("--seed", type=int, default=0, help="0: random")
    options = parser.parse_args()
    seed = options.seed or Random().randrange(1, 1 << 31)
    for name, option, share in SHARES:
        command = [
            sys.executable,
            "-m",
            f"fuzz.{name}",
            "--seed",
            str(seed),
            option,
            str(round(options.inputs * share)),
        ]
        completed = subprocess.run(command, check=False)
        if completed.returncode:
            print(f"fuzz.{name} failed, with seed {seed}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
