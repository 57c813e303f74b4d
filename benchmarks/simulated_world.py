"""The service of the tutorial in thousands of simulated worlds: without fences it is found, with fences it passes.

    python benchmarks/simulated_world.py [--seeds N]

Prints the first seed that fails without fences, and then runs N seeds with fences. The code is that of
docs/tutorials/simulated-world.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from genie.testing import Violation, explore  # noqa: E402

PAGE = ROOT / "docs" / "tutorials" / "simulated-world.md"


def main() -> None:
    """Run both services."""
    parser = argparse.ArgumentParser(description="The service of the tutorial in simulated worlds.")
    parser.add_argument("--seeds", type=int, default=10_000)
    options = parser.parse_args()
    service, *_ = re.findall(r"```python\n(# deposits\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    code: dict[str, Any] = {"__name__": "deposits"}
    exec(service, code)  # noqa: S102 - the code of the tutorial

    class FencedDatabase(code["Database"]):  # type: ignore[misc]
        fence = 0

        def apply(self, balance: int, fence: int) -> None:
            if fence < self.fence:
                raise PermissionError("stale fencing token")
            self.fence = fence
            super().apply(balance, fence)

    try:
        explore(lambda: code["main"](code["Database"]()), code["check"], seeds=200, progress=None)
    except Violation as violation:
        print(violation.summary)
    else:
        sys.exit("without fences, no seed has failed")
    began = time.perf_counter()
    explore(lambda: code["main"](FencedDatabase()), code["check"], seeds=options.seeds)
    took_s = time.perf_counter() - began
    print(f"with fences {options.seeds:,} seeds passed, in {took_s:,.0f} s")


if __name__ == "__main__":
    main()
