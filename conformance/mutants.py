"""Mutation tests of the kit: each mutant of Genie's client or server has one defect, which some case must detect.

    python -m conformance.mutants [--jobs N] [NAME…]

Every mutant names the rule or the section whose cases must detect it, so that only they run. Needs Genie's dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
START_LIMIT_S: Final = 30.0
LIMIT_S: Final = "6"
"""Seconds that a case waits for what must happen: a mutant often does nothing at all."""


@dataclass(frozen=True)
class Mutant:
    """One defect: in `file`, `text`, which occurs exactly once, is replaced by `replacement`.

    `source` is a rule number for a defect of the client, or a section of protocol.md for one of the server.
    """

    source: str
    name: str
    file: str
    text: str
    replacement: str

    @property
    def direction(self) -> str:
        """`client` or `server`."""
        return "client" if self.source.isdigit() else "server"


SESSION: Final = "client/session.py"
DISPATCHER: Final = "server/dispatcher.py"
TOKENS: Final = "Tokens and names"
"""The section whose cases need a server that requires a token."""
CREDENTIAL: Final = "Zq3vTokenOfTheKit"

CLIENT_MUTANTS: Final = [
    Mutant(
        "1",
        "the secret is the same in every process",
        SESSION,
        "secrets.token_urlsafe() if secret is None else secret,\n",
        '"the secret of this client" if secret is None else secret,\n',
    ),
    Mutant(
        "1",
        "requests are sent before welcome",
        SESSION,
        "            if self._phase is Phase.UP:\n                self._send_request(call, now)",
        "            if True:\n                self._send_request(call, now)",
    ),
    Mutant(
        "1",
        "hello lacks the namespace",
        "client/commands.py",
        "        namespace=namespace,\n        note=note,\n",
        "        note=note,\n",
    ),
    Mutant(
        "1",
        "the second address is not tried after a silent one",
        "client/aio_connection.py",
        "async with asyncio.timeout(self._servers.attempt_timeout_s):",
        "async with asyncio.timeout(None):",
    ),
    Mutant(
        "2",
        "lines are limited to 1 MiB",
        SESSION,
        "MAX_LINE_FROM_SERVER: Final = 2 << 20",
        "MAX_LINE_FROM_SERVER: Final = 1 << 20",
    ),
    Mutant(
        "2",
        "a watch forgets what it could not buffer",
        "client/watches.py",
        "            if len(watch.changes) >= MAX_BUFFERED_CHANGES:\n                watch.state = WatchState.LAGGING",
        "            if len(watch.changes) >= MAX_BUFFERED_CHANGES:\n                pass",
    ),
    Mutant(
        "3",
        "a lock with an unknown ref is kept",
        SESSION,
        "            if locked.expiresIn is None:  # not a resumption",
        "            if False:  # not a resumption",
    ),
    Mutant(
        "3",
        "answers are matched in the order of the calls",
        SESSION,
        "        call = self._pending.get(ref) if ref is not None else None\n        if not isinstance(call, kind):",
        "        call = next(iter(self._pending.values()), None)\n        if not isinstance(call, kind):",
    ),
    Mutant(
        "4",
        "released before locked is ignored",
        SESSION,
        "            outcomes.append(Outcome(request, error=errors.not_granted_error(released, find_hint)))\n",
        "",
    ),
    Mutant(
        "4",
        "a part of a line is dropped",
        "protocol/framing.py",
        "        self.partial += rest\n        return lines",
        "        return lines",
    ),
    Mutant(
        "5",
        "a cancelled request is not released",
        SESSION,
        "        if isinstance(call, Request):\n            self._release_abandoned(call, now)",
        "        pass",
    ),
    Mutant(
        "6",
        "a loss before the release is not reported",
        SESSION,
        "request.fence and released.reason != errors.SUCCESS and request.error is None",
        "False",
    ),
    Mutant(
        "6",
        "a release is confirmed before its answer",
        "client/aio.py",
        "            if release is not None:\n                await self._connection.wait_for_release(release)",
        "            self._connection.flush_soon()",
    ),
    Mutant(
        "7",
        "the clock of the client is ignored",
        "client/pending.py",
        "elif request.hold_ends_at <= now:",
        "elif False:",
    ),
    Mutant(
        "7",
        "expiresIn is ignored",
        SESSION,
        "remaining_s = request.transaction_timeout if locked.expiresIn is None else locked.expiresIn / 1000",
        "remaining_s = request.transaction_timeout",
    ),
    Mutant("7", "an extension changes nothing", SESSION, "self._requests.start_hold(request, call.sent_at)", "pass"),
    Mutant(
        "7",
        "an extension that shortens the lock counts from its answer",
        SESSION,
        "self._requests.limit_hold(call.request, call)",
        "pass",
    ),
    Mutant(
        "7",
        "the watchdog does not extend",
        SESSION,
        "for request in fired.renewing if self.up else ():",
        "for request in ():",
    ),
    Mutant("8", "no ping is sent", SESSION, "            self.send(Ping(), now)\n", "            pass\n"),
    Mutant(
        "8",
        "a hanging server is not noticed",
        "client/pending.py",
        "return self._step_count > PING_TIMEOUT_STEPS",
        "return False",
    ),
    Mutant(
        "8",
        "only pong shows that the server works",
        SESSION,
        "        self._keepalive.on_message(now)\n        try:",
        "        if b'pong' in data:\n            self._keepalive.on_message(now)\n        try:",
    ),
    Mutant(
        "8",
        "the pingInterval of the server is ignored",
        SESSION,
        "        self._keepalive.set_interval(welcome.pingInterval / 1000)\n",
        "        self._keepalive.set_interval(20)\n",
    ),
    Mutant(
        "9",
        "there is no wait between rounds",
        "client/failover.py",
        "self.next_round_delay_s = self._backoff.next_delay()",
        "pass",
    ),
    Mutant(
        "9",
        "the waits do not grow",
        "backoff.py",
        "min(2 * self._next_s, self._max_s)",
        "min(self._next_s, self._max_s)",
    ),
    Mutant("9", "the leader is ignored", "client/failover.py", "if leader else None", "if False else None"),
    Mutant(
        "9",
        "redirects are followed without an end",
        "client/failover.py",
        "leader not in self._tried and self._redirects < MAX_REDIRECTS",
        "self._redirects < 1000",
    ),
    Mutant(
        "9",
        "only the first address is tried",
        "client/failover.py",
        "remaining = list(servers.addresses)",
        "remaining = servers.addresses[:1]",
    ),
    Mutant("9", "unavailable fails a request", SESSION, "            if not unavailable:\n", "            if True:\n"),
    Mutant(
        "10",
        "commands are sent before pong",
        SESSION,
        "                self._handle_welcome(message.payload, now, outcomes)\n",
        "                self._handle_welcome(message.payload, now, outcomes)\n                self._finish_resumption(now)\n",
    ),
    Mutant(
        "10",
        "requests are not repeated",
        SESSION,
        "                self._send_request(request, now)\n        outcomes += self._send_deferred_calls(now)",
        "                pass\n        outcomes += self._send_deferred_calls(now)",
    ),
    Mutant(
        "10", "releases are not repeated", SESSION, "        for release in deferred:\n", "        for release in ():\n"
    ),
    Mutant(
        "10",
        "locks of an ended session are not released",
        SESSION,
        "        self._deferred_releases.append(Release(request.id))\n        self._requests.remove(request)",
        "        self._requests.remove(request)",
    ),
    Mutant(
        "10",
        "a lock that the server does not mention is kept",
        SESSION,
        "            elif request.connection_number != self._connection_number:\n                self._lose_unreported",
        "            elif False:\n                self._lose_unreported",
    ),
    Mutant(
        "10",
        "watches are not begun again",
        SESSION,
        "            self._lease.start(now)\n        self._send_watches(now)\n",
        "            self._lease.start(now)\n",
    ),
    Mutant(
        "10", "a snapshot is not compared", "client/watches.py", "        if not truncated:\n", "        if False:\n"
    ),
    Mutant(
        "10",
        "unknown-id fails a repeated release",
        SESSION,
        "if isinstance(call, Release) and call.maybe_executed and own_request is not None:",
        "if False:",
    ),
    Mutant(
        "11",
        "one final answer is enough",
        SESSION,
        "self._rejection = rejections[-1] if is_rejected_by_all else None",
        "self._rejection = next((r for r in rejections if r is not None), None)",
    ),
    Mutant(
        "11",
        "final errors are tried again",
        SESSION,
        "frozenset({Code.UNAUTHORIZED, Code.UNKNOWN_NAMESPACE, Code.UNSUPPORTED_PROTOCOL})",
        "frozenset[Code]()",
    ),
    Mutant("12", "the cycle is lost", "client/errors.py", "cycle=released.cycle, waits", "cycle=[], waits"),
    Mutant("12", "deadlock is an unknown reason", "client/errors.py", 'case "deadlock":', 'case "dead-lock":'),
    Mutant(
        "13",
        "a timeout of a lock is not reported",
        SESSION,
        "        if state is RequestState.HELD or lost_before_release:",
        "        if lost_before_release and state is not RequestState.HELD:",
    ),
    Mutant(
        "13",
        "a lost lock can be extended",
        "client/aio.py",
        "            await self._connection.call(extend)\n        if self._request.error is not None:",
        "            await self._connection.call(extend)\n        return\n        if self._request.error is not None:",
    ),
    Mutant(
        "14",
        "close sends no bye",
        "client/aio_connection.py",
        "            if self.session.up:\n",
        "            if False:\n",
    ),
    Mutant(
        "14",
        "close does not wait for bye",
        "client/aio_connection.py",
        "                    await self._send_and_wait(Bye())",
        "                    self.send(Bye(), self._loop.create_future())",
    ),
    Mutant(
        "14",
        "close waits too long for bye",
        "client/aio_connection.py",
        "min(BYE_TIMEOUT_S, self.response_timeout)",
        "1000",
    ),
    Mutant(
        "15",
        "an unknown command ends the connection",
        SESSION,
        "                self._handle_handshake(message, now, outcomes)\n",
        "                self._handle_handshake(message, now, outcomes)\n"
        "            case None:\n                self._request_close('an unknown message')\n",
    ),
    Mutant(
        "15",
        "an unknown reason is ignored",
        SESSION,
        "        if request is not None:\n            self._on_request_ended(",
        "        if request is not None and released.reason in errors.__doc__ + 'success transaction-timeout disconnected':\n"
        "            self._on_request_ended(",
    ),
    Mutant(
        "16",
        "great weights are sent as numbers",
        "client/commands.py",
        "max([target, *(weights or ())]) > MAX_WEIGHT",
        "False",
    ),
    Mutant(
        "16", "fractions are cut off", "client/commands.py", "return int(ms) if ms == int(ms) else ms", "return int(ms)"
    ),
    Mutant(
        "17",
        "the session timeout counts from the end of the connection that the client has noticed",
        "client/pending.py",
        "self.ends_at = max(self.ends_at, sent_at + self.timeout_s)\n\n    def stop(self) -> None:\n",
        "self.ends_at = math.inf\n\n    def stop(self) -> None:\n"
        '        self.ends_at = __import__("time").monotonic() + self.timeout_s\n',
    ),
    Mutant(
        "17",
        "any message renews the lease",
        SESSION,
        "        self._keepalive.on_message(now)\n",
        "        self._keepalive.on_message(now)\n        self._lease.renew(now)\n",
    ),
    Mutant(
        "17",
        "the lease counts from the answer",
        SESSION,
        "self._lease.renew(ping.sent_at)",
        'self._lease.renew(__import__("time").monotonic())',
    ),
    Mutant(
        "17",
        "only the keepalive sends pings",
        SESSION,
        "should_ping = self._lease.on_timer(now)",
        "self._lease.on_timer(now)",
    ),
    Mutant(
        "17",
        "the pings ignore the session timeout",
        "client/pending.py",
        "self._ping_interval_s = min(seconds, self.timeout_s / 3)",
        "self._ping_interval_s = seconds",
    ),
    Mutant(
        "17",
        "a lock whose lease has ended is not released",
        SESSION,
        "if session_ended or not confirmed or",
        "if not session_ended and not confirmed or",
    ),
    Mutant(
        "18",
        "the client takes its session back for ever",
        "client/takeover.py",
        "        if self._in_a_row < MAX_TAKEOVERS:",
        "        if True:",
    ),
    Mutant(
        "18",
        "the first takeover ends the client",
        "client/takeover.py",
        "MAX_TAKEOVERS: Final = 3",
        "MAX_TAKEOVERS: Final = 1",
    ),
]

SERVER_MUTANTS: Final = [
    Mutant(
        "Sessions",
        "a connection whose session was taken over gets no reason",
        DISPATCHER,
        "        self.outcome.send(connection, replies.error(TAKEN_OVER))\n",
        "",
    ),
    Mutant(
        "Trace context",
        "locked after a wait lacks the blockers",
        "server/notifier.py",
        "                    if first_blockers is None\n",
        "                    if True\n",
    ),
    Mutant(
        "Transport",
        "an incomplete line is dropped",
        "protocol/framing.py",
        "        self.partial += rest\n        return lines",
        "        return lines",
    ),
    Mutant(
        "hello",
        "every protocol is accepted",
        "protocol/commands.py",
        "    if command.protocol != limits.PROTOCOL:",
        "    if False:",
    ),
    Mutant(
        "hello",
        "queued is sent to a quiet connection",
        "server/notifier.py",
        "        if request.ref is None or not session.quiet:\n            self.outcome.send(session.connection, replies.queued",
        "        if True:\n            self.outcome.send(session.connection, replies.queued",
    ),
    Mutant(
        "hello",
        "a rejected hello is forgotten",
        "server/connection.py",
        '            self._reject_line(line, unavailable(line, "hello was rejected; send another hello first"))',
        "            return True",
    ),
    Mutant(
        "Namespaces",
        "the namespace of a command is ignored",
        DISPATCHER,
        "            if command.namespace == self._namespace:",
        "            if True:",
    ),
    Mutant(
        "request",
        "shared locks ignore an exclusive one",
        "core/grant.py",
        "    return not resource.exclusive_count or table.grant_count(owner, name) > 0",
        "    return True",
    ),
    Mutant(
        "Reasons",
        "a queue times out early",
        "core/manager.py",
        "request.deadline = ceil(now + timeout_ms)",
        "request.deadline = ceil(now + timeout_ms - 60)",
    ),
    Mutant(
        "Reasons",
        "a lock times out early",
        "core/manager.py",
        "request.deadline = ceil(now + request.transaction_timeout_ms)\n        self.deadlines.add(request.deadline, request.id)",
        "request.deadline = ceil(now + request.transaction_timeout_ms - 60)\n        self.deadlines.add(request.deadline, request.id)",
    ),
    Mutant(
        "Reasons",
        "the owner of an expired lock is not notified",
        "server/notifier.py",
        "            self.outcome.send(session.connection, message)\n        if requester",
        "            pass\n        if requester",
    ),
    Mutant(
        "Repeating a request",
        "a repeated ref is a new request",
        DISPATCHER,
        "                if command.ref is not None and (earlier := session.find(command.ref)) is not None:",
        "                if False and (earlier := session.find(command.ref or '')) is not None:",
    ),
    Mutant(
        "Repeating a request",
        "a repeated ref with another payload is accepted",
        DISPATCHER,
        "if not _may_be_retry(request, earlier):",
        "if False:",
    ),
    Mutant(
        "Any of these",
        "less than the target is granted",
        "core/manager.py",
        "if reached >= take.target:",
        "if reached > 0:",
    ),
    Mutant(
        "release",
        "the answer to a release carries the ref of the request",
        DISPATCHER,
        "outbox.append(success(request.id, command.ref))",
        "outbox.append(success(request.id, request.ref))",
    ),
    Mutant(
        "release",
        "a release by ref is not known",
        DISPATCHER,
        "        found = connection.session.find(command.ref)\n        if found is None:",
        "        found = None\n        if found is None:",
    ),
    Mutant(
        "extend",
        "an extension is not executed",
        DISPATCHER,
        "            notifier.handle_events(self._step(command, now), now, connection, command.ref)\n        elif type(command) is Ping:",
        "            pass\n        elif type(command) is Ping:",
    ),
    Mutant("ping", "pong lacks the ref", DISPATCHER, 'replies.bare("pong", command.ref)', 'replies.bare("pong", None)'),
    Mutant(
        "inspect", "the limit is ignored", DISPATCHER, "            limit=command.limit,", "            limit=1000,"
    ),
    Mutant("inspect", "only is ignored", DISPATCHER, "            only=command.only,", "            only=None,"),
    Mutant(
        "watch",
        "the end of a lock is no event",
        DISPATCHER,
        '                    notifier.publish(request, "unlocked")',
        "                    pass",
    ),
    Mutant(
        "watch",
        "any number of prefixes is watched",
        "server/watches.py",
        "len(watched) >= MAX_WATCHES",
        "len(watched) >= 10**9",
    ),
    Mutant(
        "Matching answers by ref",
        "unwatched lacks the ref",
        DISPATCHER,
        "replies.unwatched(command.prefix, command.ref)",
        "replies.unwatched(command.prefix, None)",
    ),
    Mutant(
        "unwatch", "a watch goes on", DISPATCHER, "            self.watches.remove(connection, command.prefix)\n", ""
    ),
    Mutant(
        "bye",
        "bye leaves the waiting requests",
        DISPATCHER,
        "        if not self._end_session(session, now, _principal_name(connection)):\n            return False\n        self.outcome",
        "        self.outcome",
    ),
    Mutant(
        "bye",
        "the connection stays open after bye",
        DISPATCHER,
        "        connection.detach()\n        self.outcome.closing.append(connection)",
        "        connection.detach()",
    ),
    Mutant(
        "release",
        "a rejection lacks the ref",
        "server/notifier.py",
        "self.reject(requester, RequestRejected(Code.UNKNOWN_ID, reason, ref=ref, id=event.id))",
        "self.reject(requester, RequestRejected(Code.UNKNOWN_ID, reason, id=event.id))",
    ),
    Mutant(
        "The queue",
        "requests overtake waiters",
        "core/grant.py",
        "    if resource.wait_queue is not None:\n        return False",
        "",
    ),
    Mutant(
        "Deadlocks",
        "deadlocks are not detected",
        "core/manager.py",
        "deadlock.may_create_cycle(table, request)",
        "False",
    ),
    Mutant(
        "When a connection ends",
        "waiting requests outlive their connection",
        DISPATCHER,
        "        elif session.bound or session.ending:\n",
        "        elif False:\n",
    ),
    Mutant(
        "Sessions",
        "a resumed session gets no live requests",
        "server/sessions.py",
        "self._requests = [*reversed(session.bound.values())]",
        "self._requests = []",
    ),
    Mutant(
        "Sessions",
        "a resumed session gets no retained replies",
        "server/sessions.py",
        "self._replies = [*session.unreceived_replies()]",
        "self._replies = []",
    ),
    Mutant(
        "Sessions",
        "every held lock ends with its session",
        "server/sessions.py",
        "(released if request.release_on_disconnect else kept).append(request)",
        "released.append(request)",
    ),
    Mutant(
        TOKENS,
        "the first line may be long",
        "server/auth.py",
        "self._max_bytes = MAX_HELLO_BYTES if principal is None else max_line",
        "self._max_bytes = max_line",
    ),
    Mutant(
        TOKENS,
        "a connection without a token stays open",
        "server/connection.py",
        "    def reject_unauthenticated(self, denial: Denial = NO_HELLO) -> None:\n",
        "    def reject_unauthenticated(self, denial: Denial = NO_HELLO) -> None:\n        return\n\n"
        "    def _unused(self, denial: Denial = NO_HELLO) -> None:\n",
    ),
    Mutant(
        "Errors",
        "HTTP requests are commands",
        "server/connection.py",
        "AWAIT_HELLO and is_http(line)",
        "AWAIT_HELLO and False",
    ),
    Mutant(
        "Limits",
        "lines may have 4 MiB",
        "config.py",
        "max_line: int = MAX_LINE_BYTES",
        "max_line: int = 4 * MAX_LINE_BYTES",
    ),
]

MUTANTS: Final = [*CLIENT_MUTANTS, *SERVER_MUTANTS]


def run_mutant(mutant: Mutant) -> tuple[Mutant, str]:
    """Run the cases of a mutant's rule or section. Return the mutant and the failed cases, or "" if none failed."""
    with tempfile.TemporaryDirectory() as folder:
        for package in ("genie", "conformance"):
            shutil.copytree(ROOT / package, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder, "genie", mutant.file)
        source = file.read_text(encoding="utf-8")
        if source.count(mutant.text) != 1:
            return mutant, f"DOES NOT APPLY: its text occurs {source.count(mutant.text)} times in {mutant.file}"
        file.write_text(source.replace(mutant.text, mutant.replacement), encoding="utf-8")
        options = ["--json", "--limit", LIMIT_S, "--filter", mutant.source]
        if mutant.direction == "client":
            command = ["--", sys.executable, "-m", "conformance.adapters.asyncio_client"]
            return mutant, failed_cases(folder, ["client", *options, *command])
        token = CREDENTIAL if mutant.source == TOKENS else ""
        options += ["--token", token] if token else []
        with running_server(folder, token) as address:
            return mutant, failed_cases(folder, ["server", *options, address])


def failed_cases(folder: str, arguments: Sequence[str]) -> str:
    """Run the kit in a folder; return the names of the failed cases."""
    process = subprocess.run(  # noqa: S603 - the kit itself
        [sys.executable, "-m", "conformance", *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if not process.stdout:
        return f"CRASHES: {(process.stderr.strip().splitlines() or [''])[-1]}"
    results: dict[str, Any] = json.loads(process.stdout)
    return ", ".join(case["name"] for case in results["cases"] if case["outcome"] == "failed")


def environment(folder: str) -> dict[str, str]:
    """Return the environment for the code in a folder, without settings of Genie."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    return inherited | {"PYTHONPATH": folder}


@contextmanager
def running_server(folder: str, token: str) -> Iterator[str]:
    """Run `genie serve` with the code in a folder; yield its address. Clients need a token unless it is empty."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    settings = {"GENIE_PORT": str(port), "GENIE_ADMIN_PORT": "", "GENIE_LOG_LEVEL": "error", "GENIE_TOKEN": token}
    process = subprocess.Popen(
        [sys.executable, "-m", "genie.cli", "serve"],
        cwd=folder,
        env=environment(folder) | settings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """Run the mutants whose names or sources are given, or all; return 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="part of a mutant's name, or its rule or section")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time (2)")
    options = parser.parse_args()
    selected = [
        mutant
        for mutant in MUTANTS
        if not options.names or any(name in mutant.name or name == mutant.source for name in options.names)
    ]
    undetected = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, result in pool.map(run_mutant, selected):
            is_detected = bool(result) and not result[:1].isupper()
            undetected += not is_detected
            print(f"{mutant.direction} {mutant.source}: {mutant.name}\n    {result or 'SURVIVES'}", flush=True)
    print(f"{len(selected)} mutants, {undetected} not detected")
    return 1 if undetected or not selected else 0


if __name__ == "__main__":
    sys.exit(main())
