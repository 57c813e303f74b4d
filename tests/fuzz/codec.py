"""Feeds bytes to the parsers of the protocol: `python -m fuzz.codec --runs 100000` (with tests/ on the path).

With atheris the inputs are guided by coverage. Without it (it exists for Linux only), or with `--plain`, they are purely
random. Either way a seed decides the inputs. An input that reveals a defect is printed, and `--input` repeats it.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import os
import sys
import time
import traceback
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import ModuleType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.corpus import examples
from fuzz.mutation import mutate

EXPECTED = (
    *("framing", "framing too long", "address", "address rejected", "resource", "resource rejected"),
    *("command Request", "command Release", "command ReleaseByRef", "command Take", "command Extend"),
    *("command Ping", "command Hello", "command Bye", "command Inspect", "command Watch", "command Unwatch"),
    "command Namespaced",
    *("command rejected bad-json", "command rejected bad-message", "command rejected bad-request"),
    *("command rejected unknown-command", "message rejected", "message unknown", "message Queued", "message Locked"),
    *("message Released", "message Extended", "message Pong", "message Inspected", "message Watching"),
    *("message Unwatched", "message Event", "message Error", "message Welcome", "reply Queued", "reply Locked"),
    *("reply Released", "reply Error", "reply Event", "reply Watching", "reply Extended", "reply Welcome"),
)
"""The results of `properties.check` that a long run must have observed."""

ADDR_NO_RANDOMIZE = 0x0040000
"""A flag of Linux's personality(2)."""

LONG = 20_000
"""The number of inputs after which the coverage must be complete."""


class Inputs:
    """Checks inputs and counts their results. Ends the process: with 0 after `runs` or `seconds`, with 1 after a defect."""

    def __init__(self, runs: int, seconds: float) -> None:
        from fuzz import properties

        self.check = properties.check
        self.kinds = len(properties.PROPERTIES)
        self.coverage: Counter[str] = Counter()
        self.done, self.runs = 0, runs
        self.started_at = time.monotonic()
        self.until = self.started_at + seconds

    def feed(self, data: bytes) -> None:
        """Check one input."""
        try:
            self.coverage[self.check(data)] += 1
        except BaseException:  # noqa: BLE001 - every error is a defect
            sys.stdout.flush()
            traceback.print_exc()
            text = base64.b64encode(data).decode()
            print(f"\na defect after {self.done} inputs: {data[:300]!r}", file=sys.stderr)
            print(f"reproduce: PYTHONPATH=tests python -m fuzz.codec --input {text}", file=sys.stderr)
            self.exit(1)
        self.done += 1
        if self.done >= self.runs or (self.done % 256 == 0 and time.monotonic() > self.until):
            self.exit(self.report())

    def report(self) -> int:
        """Print the coverage; return the exit status."""
        took_s = time.monotonic() - self.started_at
        print(f"codec: {self.done} inputs in {took_s:.1f} s")
        for result, count in sorted(self.coverage.items()):
            print(f"  {count:>9}  {result}")
        missing = [result for result in EXPECTED if not self.coverage[result]] if self.done >= LONG else []
        if missing:
            print(f"never observed: {', '.join(missing)}")
        return 1 if missing else 0

    def exit(self, status: int) -> NoReturn:
        """End the process without cleanup: libFuzzer would report a crash of its own."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def random_input(random: Random, kinds: int, lines: list[bytes]) -> bytes:
    """Return a random input: a mutation of one of the lines, or random parts of one or of an address."""
    line = random.choice(lines)
    for _ in range(random.choice((0, 1, 1, 1, 2))):
        line = mutate(random, line)
    kind = random.randrange(kinds)
    if random.random() < 0.1:
        line = b"\n".join(random.choice((b"", b"\r", b"ab", line, line[:40] + b"\r")) for _ in range(5))
    elif random.random() < 0.1:
        words = (b":", b",", b"[::1]", b"7077", b"65536", b"host", b"shared:", b"exclusive:", b"\x7f", b" ", b"-1")
        line = b"".join(random.choice(words) for _ in range(random.randrange(1, 6)))
    return bytes([kind]) + line


def run_random(inputs: Inputs, seed: int) -> NoReturn:
    """Check purely random inputs."""
    random, lines = Random(seed), examples()
    while True:
        inputs.feed(random_input(random, inputs.kinds, lines))


def run_guided(inputs: Inputs, seed: int, atheris: ModuleType) -> NoReturn:
    """Check inputs that atheris chooses by coverage, mutated by libFuzzer or by `mutation`."""
    lines = examples()

    def mutate_input(data: bytes, max_size: int, mutation_seed: int) -> bytes:
        random = Random(mutation_seed)
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        if random.random() < 0.3:
            return random_input(random, inputs.kinds, lines)[:max_size]
        return (data[:1] + mutate(random, bytes(data[1:])))[:max_size]

    options = [
        sys.argv[0],
        f"-seed={seed}",
        "-max_len=1000",
        "-verbosity=0",
        "-print_final_stats=0",
        "-rss_limit_mb=4096",
    ]
    atheris.Setup(options, inputs.feed, custom_mutator=mutate_input)
    atheris.Fuzz()
    raise AssertionError("atheris.Fuzz has returned")


def restart_without_randomization(seed: int) -> None:
    """Restart this process without randomization of addresses and hashes, unless it runs so already.

    libFuzzer identifies branches and comparisons by their addresses, so a seed gives the same inputs only with the same
    addresses. If the system does not permit that (a container may not), the fuzzer runs with random ones.
    """
    if os.environ.get("PYTHONHASHSEED") == "0":
        return
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
    command = [sys.executable, *sys.orig_argv[1:], "--seed", str(seed)]
    os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})  # noqa: S606


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1 << 62, help="number of inputs (default: unlimited)")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after this time")
    parser.add_argument("--seed", type=int, default=0, help="0: random")
    parser.add_argument("--plain", action="store_true", help="purely random inputs, without atheris")
    parser.add_argument("--input", help="check one input, in base64, as a failed run printed it")
    options = parser.parse_args()
    seed = options.seed or Random().randrange(1, 1 << 31)
    atheris = None
    if options.input is None and not options.plain and find_spec("atheris") is not None:
        restart_without_randomization(seed)
        import atheris

        with atheris.instrument_imports(include=["genie.protocol", "genie.client.config"]):
            import genie.client.config
            import genie.protocol.commands
            import genie.protocol.messages  # noqa: F401
    inputs = Inputs(options.runs if options.input is None else 1, options.seconds)
    if options.input is not None:
        inputs.feed(base64.b64decode(options.input))
    print(f"codec: seed {seed}, {'random' if atheris is None else 'guided by atheris'}", flush=True)
    for line in examples():
        for kind in range(inputs.kinds):
            inputs.feed(bytes([kind]) + line)
    if atheris is None:
        run_random(inputs, seed)
    run_guided(inputs, seed, atheris)


if __name__ == "__main__":
    main()
