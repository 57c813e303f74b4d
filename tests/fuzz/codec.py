"""Feeds bytes to the readers of the protocol: `python -m fuzz.codec --runs 100000` (with tests/ on the path).

With atheris the bytes are led by the branches that they reach. Where there is no atheris (it exists for Linux only), or with
`--plain`, they come from a generator alone. Either way a seed decides the bytes, and an input that shows a defect is printed
so that `--input` repeats it.
"""

from __future__ import annotations

import argparse
import base64
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
from fuzz.mutation import damaged

EXPECTED = (
    *("framing", "framing too long", "address", "address refused", "resource", "resource refused"),
    *("command Request", "command Release", "command ReleaseByRef", "command Take", "command Extend"),
    *("command Ping", "command Hello", "command Bye", "command Inspect", "command Watch", "command Unwatch"),
    "command Namespaced",
    *("command refused bad-json", "command refused bad-message", "command refused bad-request"),
    *("command refused unknown-command", "message refused", "message unknown", "message Queued", "message Locked"),
    *("message Released", "message Extended", "message Pong", "message Inspected", "message Watching"),
    *("message Unwatched", "message Event", "message Error", "message Welcome", "reply Queued", "reply Locked"),
    *("reply Released", "reply Error", "reply Event", "reply Watching", "reply Extended", "reply Welcome"),
)
"""What a long run must have seen. (`command` names what was read.)"""

LONG = 20_000
"""Inputs from which on all of that must have been seen."""


class Inputs:
    """Counts what the inputs show, and ends the process: with 0 after `runs` or `seconds`, with 1 at a defect."""

    def __init__(self, runs: int, seconds: float) -> None:
        from fuzz import properties

        self.check = properties.check
        self.kinds = len(properties.PROPERTIES)
        self.seen: Counter[str] = Counter()
        self.done, self.runs = 0, runs
        self.began = time.monotonic()
        self.until = self.began + seconds

    def feed(self, data: bytes) -> None:
        """One input."""
        try:
            self.seen[self.check(data)] += 1
        except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
            sys.stdout.flush()
            traceback.print_exc()
            text = base64.b64encode(data).decode()
            print(f"\na defect after {self.done} inputs: {data[:300]!r}", file=sys.stderr)
            print(f"again: PYTHONPATH=tests python -m fuzz.codec --input {text}", file=sys.stderr)
            self.leave(1)
        self.done += 1
        if self.done >= self.runs or (self.done % 256 == 0 and time.monotonic() > self.until):
            self.leave(self.report())

    def report(self) -> int:
        """Tell what was seen; returns the exit status."""
        took_s = time.monotonic() - self.began
        print(f"codec: {self.done} inputs in {took_s:.1f} s")
        for word, count in sorted(self.seen.items()):
            print(f"  {count:>9}  {word}")
        missing = [word for word in EXPECTED if not self.seen[word]] if self.done >= LONG else []
        if missing:
            print(f"never seen: {', '.join(missing)}")
        return 1 if missing else 0

    def leave(self, status: int) -> NoReturn:
        """At once: libFuzzer would add a report of its own, and call it a crash."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def made(random: Random, kinds: int, pool: list[bytes]) -> bytes:
    """An input from nothing but chance and the examples."""
    line = random.choice(pool)
    for _ in range(random.choice((0, 1, 1, 1, 2))):
        line = damaged(random, line)
    kind = random.randrange(kinds)
    if random.random() < 0.1:
        line = b"\n".join(random.choice((b"", b"\r", b"ab", line, line[:40] + b"\r")) for _ in range(5))
    elif random.random() < 0.1:
        words = (b":", b",", b"[::1]", b"7077", b"65536", b"host", b"shared:", b"exclusive:", b"\x7f", b" ", b"-1")
        line = b"".join(random.choice(words) for _ in range(random.randrange(1, 6)))
    return bytes([kind]) + line


def plainly(inputs: Inputs, seed: int) -> NoReturn:
    """Inputs by chance alone."""
    random, pool = Random(seed), examples()
    while True:
        inputs.feed(made(random, inputs.kinds, pool))


def guided(inputs: Inputs, seed: int, atheris: ModuleType) -> NoReturn:
    """Inputs that atheris chooses by what they reach, and changes in its way or in ours."""
    pool = examples()

    def mutate(data: bytes, max_size: int, chance: int) -> bytes:
        random = Random(chance)
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        if random.random() < 0.3:
            return made(random, inputs.kinds, pool)[:max_size]
        return (data[:1] + damaged(random, bytes(data[1:])))[:max_size]

    options = [
        sys.argv[0],
        f"-seed={seed}",
        "-max_len=1000",
        "-verbosity=0",
        "-print_final_stats=0",
        "-rss_limit_mb=4096",
    ]
    atheris.Setup(options, inputs.feed, custom_mutator=mutate)
    atheris.Fuzz()
    raise AssertionError("atheris has come to an end of its own")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1 << 62, help="inputs (default: no bound)")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long")
    parser.add_argument("--seed", type=int, default=0, help="0: another each time")
    parser.add_argument("--plain", action="store_true", help="do without atheris")
    parser.add_argument("--input", help="one input, in base64, as a failed run printed it")
    options = parser.parse_args()
    seed = options.seed or Random().randrange(1, 1 << 31)
    atheris = None
    if options.input is None and not options.plain and find_spec("atheris") is not None:
        import atheris

        with atheris.instrument_imports(include=["genie.protocol", "genie.client.config"]):
            import genie.client.config
            import genie.protocol.commands
            import genie.protocol.messages  # noqa: F401
    inputs = Inputs(options.runs if options.input is None else 1, options.seconds)
    if options.input is not None:
        inputs.feed(base64.b64decode(options.input))
    print(f"codec: seed {seed}, {'by chance' if atheris is None else 'led by atheris'}", flush=True)
    for line in examples():
        for kind in range(inputs.kinds):
            inputs.feed(bytes([kind]) + line)
    if atheris is None:
        plainly(inputs, seed)
    guided(inputs, seed, atheris)


if __name__ == "__main__":
    main()
