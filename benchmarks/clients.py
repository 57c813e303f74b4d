"""The clients of all languages beside a raw loop over the same socket in their own language.

    python benchmarks/clients.py [--rounds N] [--seconds S] [--only WORDS]

One task, and 64 tasks, lock a name of their own and release it, on one connection of a client. The raw loop does the same
without a client: it writes the two lines, and decodes the two replies. Both take turns in each round, in one process beside
one server, which keeps its locks in memory and runs on a processor of its own. The ratio is the median of the rounds.

The programs of the other languages are built by `make clients`; without their program a row is left out, which is said. The
goals are a ratio of 0.9 with one task and of 0.7 with 64. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.processes import executes, free_port, pinned, serving  # noqa: E402

GOALS = {1: 0.9, 64: 0.7}
PROGRAMS = {
    "python": [sys.executable, str(ROOT / "benchmarks/clients_parts/python_client.py")],
    "typescript": ["node", str(ROOT / "clients/typescript/build/bench/bench.js")],
    "go": [str(ROOT / "build/clients-go/bench")],
    "java": [str(ROOT / "build/clients-java/bench")],
}
"""The benchmark of each language. It takes HOST:PORT, --rounds and --seconds, and prints a JSON object with `language`,
`runtime` and `results`; each result has `tasks`, the rates `raw` and `client` in cycles a second, and `ratio`."""


def main() -> int:
    """Run the benchmark, and return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each loop")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    options = parser.parse_args()
    prefix, _, processor = pinned()
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    environment |= {"GENIE_PORT": str(port), "GENIE_ADMIN_PORT": "", "GENIE_LOG_LEVEL": "warning"}
    server = [*prefix, str(Path(sys.executable).with_name("genie")), "serve"]
    reports = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(server, Path(folder) / "log", lambda: executes(port), environment=environment),
    ):
        for language in options.only:
            program = PROGRAMS[language]
            if not Path(program[-1]).exists():
                print(f"{language}: not built; make clients builds {Path(program[-1]).relative_to(ROOT)}")
                continue
            arguments = [f"127.0.0.1:{port}", "--rounds", str(options.rounds), "--seconds", str(options.seconds)]
            client_prefix = [] if processor is None else ["taskset", "-c", str(processor)]
            done = subprocess.run([*client_prefix, *program, *arguments], stdout=subprocess.PIPE, check=True)
            reports.append(json.loads(done.stdout))
    print_table(reports)
    return int(any(result["ratio"] < GOALS[result["tasks"]] for report in reports for result in report["results"]))


def print_table(reports: list[dict[str, Any]]) -> None:
    """Print a row for each client and number of tasks."""
    print("| client | tasks | raw loop, cycles/s | client, cycles/s | ratio | goal |")
    print("| --- | --: | --: | --: | --: | --: |")
    for report in reports:
        for result in report["results"]:
            tasks, ratio = result["tasks"], result["ratio"]
            name = f"{report['language']} ({report['runtime']})"
            print(
                f"| {name} | {tasks} | {result['raw']:,.0f} | {result['client']:,.0f} | {ratio:.2f} | {GOALS[tasks]} |"
            )


if __name__ == "__main__":
    sys.exit(main())
