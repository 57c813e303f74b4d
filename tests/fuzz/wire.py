"""Sends lines over real sockets to a real server: it must reply, stay alive, log no error, and not grow.

`python -m fuzz.wire --lines 20000` (with tests/ on the path). The content of the replies is checked by `fuzz.server`, which
has a virtual clock. Here each line must be a known message, each `ping` must get its `pong`, and a connection may be closed
only for a reason.
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

from fuzz.grammar import SECRETS, Grammar, make_line
from fuzz.sent_commands import LineSplitter
from support.processes.servers import WAIT_S, Genie, resident_bytes, running_redis, running_server

PING = make_line("ping") + b"\n"
LINES_PER_PING = 40
"""Lines that are sent on a connection before the next `ping`."""

MAX_LINE = 4096
MAX_GROWTH_BYTES = 48 << 20
"""How much the memory of the server may grow after the first quarter of the lines."""

LONG_TIMEOUTS = {"store_timeout_ms": 600_000, "lease": 600}
"""Settings with which a slow store does not count as unavailable."""

KNOWN = {
    *("queued", "locked", "released", "extended", "pong", "inspected", "welcome", "watching", "unwatched"),
    *("event", "error", "bye"),
}


class Connection:
    """One client connection. `ids` collects the ids in messages."""

    def __init__(self, address: tuple[str, int], coverage: Counter[str], ids: list[int]) -> None:
        self.coverage, self.ids = coverage, ids
        self.sock = socket.create_connection(address, WAIT_S)
        self.splitter = LineSplitter(MAX_LINE)
        self.rest = b""
        self.pongs = self.pings = 0
        self.session = self.bye = False

    def send(self, data: bytes) -> None:
        """Send bytes; the server may have closed the connection."""
        commands = self.splitter.feed(data, 0)
        self.pings += sum(command.kind == "ping" for command in commands)
        self.session = self.session or any(command.kind == "hello" and command.decoded.session for command in commands)
        self.bye = self.bye or any(command.kind == "bye" for command in commands)
        with suppress(ConnectionError):
            self.sock.sendall(data)

    def receive(self) -> bool:
        """Receive until every `ping` has its `pong`; False if the server has closed the connection for a reason."""
        while self.pongs < self.pings or self.splitter.ended:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                assert self.splitter.ended or self.session or self.bye, (
                    "the server closed a connection without a reason"
                )
                self.coverage["closed"] += 1
                return False
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in lines:
                self._check_message(line)
        return True

    def _check_message(self, line: bytes) -> None:
        message = orjson.loads(line)
        command, payload = message["command"], message["payload"]
        assert command in KNOWN, line
        self.coverage[f"received {command}"] += 1
        self.pongs += command == "pong"
        if command in ("queued", "locked"):
            self.ids.append(payload["id"])
        if command == "error":
            self.coverage[f"received error {payload['code']}"] += 1
            assert payload["code"] != "unavailable", "the store is available"


def send_lines(genie: Genie, seed: int, lines: int, coverage: Counter[str]) -> None:
    """Send random lines on three connections at a time, which are replaced at random."""
    random = Random(seed)
    grammar, ids, connections, lines_done, initial_bytes = Grammar(random), [0], [], 0, 0
    while lines_done < lines:
        if len(connections) < 3:
            connections.append(Connection(genie.address, coverage, ids))
            # After a rejected `hello` no `ping` would get a reply, so a valid line is sent first.
            quiet = random.random() < 0.5
            hello = make_line("hello", session=random.choice(SECRETS), quiet=quiet, protocol=1, client="fuzz/1")
            connections[-1].send(hello + b"\n" if random.random() < 0.5 else PING)
        connection = connections[random.randrange(len(connections))]
        for _ in range(LINES_PER_PING):
            line = grammar.line()
            for index in range(40):
                line = line.replace(b"@%d@" % index, b"%d" % ids[-1 - index % min(len(ids), 40)])
            cut = random.randrange(len(line) + 1)
            connection.send(line[:cut])
            connection.send(line[cut:] + b"\n")
        lines_done += LINES_PER_PING
        if random.random() < 0.01:
            connection.send(b"x" * (MAX_LINE + 2))
        connection.send(b"\n" + PING)
        if not connection.receive() or random.random() < 0.2:
            connection.sock.close()
            connections.remove(connection)
        del ids[:-100]
        if not initial_bytes and lines_done > lines // 4:
            initial_bytes = resident_bytes(genie)
    for connection in connections:
        connection.sock.close()
    assert genie.process is not None
    assert genie.process.poll() is None, "the server process has ended"
    grown = resident_bytes(genie) - initial_bytes
    assert grown < MAX_GROWTH_BYTES, f"the server grew by {grown} bytes"
    coverage["lines"] += lines_done


def stop_server(genie: Genie) -> None:
    """Terminate the server, and check that it exits with 0 and has logged no error."""
    assert genie.process is not None
    genie.process.terminate()
    status = genie.wait()
    assert status == 0, f"the server ended with {status}"
    while (line := genie._lines.get(timeout=WAIT_S)) is not None:
        genie.log.append(line)
    errors = [line for line in genie.log if line.get("level") in ("error", "critical")]
    assert not errors, f"the server logged {errors[:3]}"


def run(seed: int, lines: int) -> None:
    """Send half of the lines to a server without a store, and half to one with Redis."""
    coverage: Counter[str] = Counter()
    started_at = time.monotonic()
    try:
        with running_server(max_line=MAX_LINE) as genie:
            send_lines(genie, seed, lines // 2, coverage)
            stop_server(genie)
        with running_redis() as redis, running_server(redis, max_line=MAX_LINE, **LONG_TIMEOUTS) as genie:
            send_lines(genie, seed + 1, lines // 2, coverage)
            stop_server(genie)
    except AssertionError:
        print(f"reproduce: PYTHONPATH=tests python -m fuzz.wire --seed {seed} --lines {lines}", file=sys.stderr)
        raise
    print(f"wire: {coverage['lines']} lines over sockets, seed {seed}, in {time.monotonic() - started_at:.1f} s")
    for kind, count in sorted(coverage.items()):
        print(f"  {count:>9}  {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="0: random")
    options = parser.parse_args()
    run(options.seed or Random().randrange(1, 1 << 31), options.lines)


if __name__ == "__main__":
    main()
