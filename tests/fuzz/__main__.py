"""All fuzzers, one after the other: `python -m fuzz` (with tests/ on the path). It ends at the first that finds something."""

from __future__ import annotations

import argparse
import subprocess
import sys
from random import Random

SHARES = (("codec", "--runs", 0.5), ("server", "--lines", 0.48), ("wire", "--lines", 0.02))
"""Which fuzzer gets which part of the inputs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs and lines in all (default: a million)")
    parser.add_argument("--seed", type=int, default=0, help="0: another each time")
    options = parser.parse_args()
    seed = options.seed or Random().randrange(1, 1 << 31)
    for name, many, share in SHARES:
        command = [sys.executable, "-m", f"fuzz.{name}", "--seed", str(seed), many, str(round(options.inputs * share))]
        ran = subprocess.run(command, check=False)
        if ran.returncode:
            print(f"fuzz.{name} has found something; the seed of all is {seed}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
