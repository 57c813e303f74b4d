"""Lines over real sockets to a real process: it lives, answers, logs no defect, and takes no more memory than before.

`python -m fuzz.wire --lines 20000` (with tests/ on the path). What exactly it answers is looked at in `server`, where time
stands still; here every line is JSON that is known, whoever waits for a `pong` gets it, and nobody is hung up on who has
given no cause.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.grammar import SECRETS, Grammar, said
from fuzz.sent_commands import LineSplitter
from servers import WAIT_S, Genie, resident, running_redis, running_server

PING = said("ping") + b"\n"
ROUND = 40
"""Lines to a connection before it is asked whether it still lives."""

MAX_LINE = 4096
ROOM = 48 << 20
"""Bytes by which the server may grow once it is warm."""

PATIENT = {"store_timeout_ms": 600_000, "lease": 600}
"""Of a server that takes a slow store for one that is there."""

KNOWN = {
    *("queued", "locked", "released", "extended", "pong", "inspected", "welcome", "watching", "unwatched"),
    *("event", "error", "bye"),
}


class Talk:
    """One connection."""

    def __init__(self, address: tuple[str, int], coverage: Counter[str], ids: list[int]) -> None:
        self.coverage, self.ids = coverage, ids
        self.sock = socket.create_connection(address, WAIT_S)
        self.splitter = LineSplitter(MAX_LINE)
        self.rest = b""
        self.pongs = self.pings = 0
        self.session = self.bye = False

    def say(self, data: bytes) -> None:
        """Bytes; the server may have hung up."""
        found = self.splitter.say(data, 0)
        self.pings += sum(one.kind == "ping" for one in found)
        self.session = self.session or any(one.kind == "hello" and one.command.session for one in found)
        self.bye = self.bye or any(one.kind == "bye" for one in found)
        with suppress(ConnectionError):
            self.sock.sendall(data)

    def hear(self) -> bool:
        """Until every ping is answered; False: the server has hung up, and had cause to."""
        while self.pongs < self.pings or self.splitter.over:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                assert self.splitter.over or self.session or self.bye, "the server hung up without a cause"
                self.coverage["closed"] += 1
                return False
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in lines:
                self._heard(line)
        return True

    def _heard(self, line: bytes) -> None:
        message = orjson.loads(line)
        command, payload = message["command"], message["payload"]
        assert command in KNOWN, line
        self.coverage[f"received {command}"] += 1
        self.pongs += command == "pong"
        if command in ("queued", "locked"):
            self.ids.append(payload["id"])
        if command == "error":
            self.coverage[f"received error {payload['code']}"] += 1
            assert payload["code"] != "unavailable", "the store is there"


def talk(genie: Genie, seed: int, lines: int, coverage: Counter[str]) -> None:
    """Say lines on one connection after the other, and three at once."""
    random = Random(seed)
    grammar, ids, talks, done, warm = Grammar(random), [0], [], 0, 0
    while done < lines:
        if len(talks) < 3:
            talks.append(Talk(genie.address, coverage, ids))
            # A `hello` that is rejected would leave it without an answer to any ping: something good comes first.
            quiet = random.random() < 0.5
            hello = said("hello", session=random.choice(SECRETS), quiet=quiet, protocol=1, client="fuzz/1")
            talks[-1].say(hello + b"\n" if random.random() < 0.5 else PING)
        one = talks[random.randrange(len(talks))]
        for _ in range(ROUND):
            line = grammar.line()
            for place in range(40):
                line = line.replace(b"@%d@" % place, b"%d" % ids[-1 - place % min(len(ids), 40)])
            cut = random.randrange(len(line) + 1)
            one.say(line[:cut])
            one.say(line[cut:] + b"\n")
        done += ROUND
        if random.random() < 0.01:
            one.say(b"x" * (MAX_LINE + 2))
        one.say(b"\n" + PING)
        if not one.hear() or random.random() < 0.2:
            one.sock.close()
            talks.remove(one)
        del ids[:-100]
        if not warm and done > lines // 4:
            warm = resident(genie)
    for one in talks:
        one.sock.close()
    assert genie.process is not None
    assert genie.process.poll() is None, "the server has ended"
    grown = resident(genie) - warm
    assert grown < ROOM, f"the server grew by {grown} bytes"
    coverage["lines"] += done


def end(genie: Genie) -> None:
    """It leaves in peace, and has logged no error."""
    assert genie.process is not None
    genie.process.terminate()
    status = genie.wait()
    assert status == 0, f"the server ended with {status}"
    while (line := genie._lines.get(timeout=WAIT_S)) is not None:
        genie.log.append(line)
    errors = [line for line in genie.log if line.get("level") in ("error", "critical")]
    assert not errors, f"the server logged {errors[:3]}"


def run(seed: int, lines: int) -> None:
    """Half of it to a server that keeps its locks in memory, half to one with Redis."""
    coverage: Counter[str] = Counter()
    began = time.monotonic()
    try:
        with running_server(max_line=MAX_LINE) as genie:
            talk(genie, seed, lines // 2, coverage)
            end(genie)
        with running_redis() as redis, running_server(redis, max_line=MAX_LINE, **PATIENT) as genie:
            talk(genie, seed + 1, lines // 2, coverage)
            end(genie)
    except AssertionError:
        print(f"again: PYTHONPATH=tests python -m fuzz.wire --seed {seed} --lines {lines}", file=sys.stderr)
        raise
    print(f"wire: {coverage['lines']} lines over sockets, seed {seed}, in {time.monotonic() - began:.1f} s")
    for word, count in sorted(coverage.items()):
        print(f"  {count:>9}  {word}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="0: another each time")
    options = parser.parse_args()
    run(options.seed or Random().randrange(1, 1 << 31), options.lines)


if __name__ == "__main__":
    main()
