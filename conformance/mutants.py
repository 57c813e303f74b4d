"""Mutation tests of the kit: each mutant of Genie's client or server has one defect, which some case must detect.

    python -m conformance.mutants [--jobs N] [NAME…]

Every mutant names the rule or the section whose cases must detect it, so that only they run. Needs Genie's dependencies.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from conformance.mutation import Mutant, NotRunError, environment, main, mutated

START_LIMIT_S: Final = 30.0
LIMIT_S: Final = "6"
"""Seconds that a case waits for what must happen: a mutant often does nothing at all."""


SESSION: Final = "client/session.py"
REQUESTS: Final = "client/requests.py"
HANDSHAKE: Final = "client/handshake.py"
DISPATCHER: Final = "server/dispatcher.py"
TOKENS: Final = "Access tokens and names"
"""The section whose cases need a server that requires a token."""
CREDENTIAL: Final = "Zq3vTokenOfTheKit"

CLIENT_MUTANTS: Final = [
    Mutant(
        "the secret is the same in every process",
        SESSION,
        "use_secret(secrets.token_urlsafe())",
        'use_secret("the secret of this client")',
        source="1",
    ),
    Mutant(
        "requests are sent before welcome",
        REQUESTS,
        "        if self._handshake.phase is UP:\n            self._send(request, now)",
        "        if True:\n            self._send(request, now)",
        source="1",
    ),
    Mutant(
        "hello lacks the namespace",
        "client/commands.py",
        "        namespace=namespace,\n        note=note,\n",
        "        note=note,\n",
        source="1",
    ),
    Mutant(
        "the second address is not tried after a silent one",
        "client/aio_connection.py",
        "async with asyncio.timeout(self._servers.attempt_timeout_s):",
        "async with asyncio.timeout(None):",
        source="1",
    ),
    Mutant(
        "lines are limited to 1 MiB",
        SESSION,
        "MAX_LINE_FROM_SERVER: Final = 2 << 20",
        "MAX_LINE_FROM_SERVER: Final = 1 << 20",
        source="2",
    ),
    Mutant(
        "a watch forgets what it could not buffer",
        "client/watches.py",
        "            if len(watch.changes) >= MAX_BUFFERED_CHANGES:\n                watch.state = WatchState.LAGGING",
        "            if len(watch.changes) >= MAX_BUFFERED_CHANGES:\n                pass",
        source="2",
    ),
    Mutant(
        "a lock with an unknown ref is kept",
        REQUESTS,
        "            if locked.expiresIn is None:  # not a resumption",
        "            if False:  # not a resumption",
        source="3",
    ),
    Mutant(
        "answers are matched in the order of the calls",
        "client/calls.py",
        "        call = self.pending.get(ref) if ref is not None else None\n        if not isinstance(call, kind):",
        "        call = next(iter(self.pending.values()), None)\n        if not isinstance(call, kind):",
        source="3",
    ),
    Mutant(
        "released before locked is ignored",
        REQUESTS,
        "            self._calls.outcomes.append(Outcome(request, error=error))\n            return\n",
        "            return\n",
        source="4",
    ),
    Mutant(
        "a part of a line is dropped",
        "protocol/framing.py",
        "        self.partial += incomplete\n        return lines",
        "        return lines",
        source="4",
    ),
    Mutant(
        "a cancelled request is not released",
        SESSION,
        "        if isinstance(call, Request):\n            self.requests.abandon(call, now)",
        "        pass",
        source="5",
    ),
    Mutant(
        "a loss before the release is not reported",
        REQUESTS,
        "request.fence and released.reason != errors.SUCCESS and request.error is None",
        "False",
        source="6",
    ),
    Mutant(
        "a release is confirmed before its answer",
        "client/aio.py",
        "            if release is not None:\n                await self._connection.wait_for_release(release)",
        "            self._connection.flush_soon()",
        source="6",
    ),
    Mutant(
        "the clock of the client is ignored",
        "client/live_requests.py",
        "if request.hold_ends_at <= now:",
        "if False:",
        source="7",
    ),
    Mutant(
        "expiresIn is ignored",
        REQUESTS,
        "remaining_s = request.transaction_timeout if locked.expiresIn is None else locked.expiresIn / 1000",
        "remaining_s = request.transaction_timeout",
        source="7",
    ),
    Mutant("an extension changes nothing", REQUESTS, "self.live.start_hold(request, call.sent_at)", "pass", source="7"),
    Mutant(
        "an extension that shortens the lock counts from its answer",
        REQUESTS,
        "self.live.limit_hold(extend.request, extend)",
        "pass",
        source="7",
    ),
    Mutant(
        "an answered extension prolongs the lock beyond a later one without an answer",
        REQUESTS,
        "self.live.limit_hold(request, later)",
        "pass",
        source="7",
    ),
    Mutant(
        "the watchdog does not extend",
        REQUESTS,
        "for request in fired.renewing:",
        "for request in ():",
        source="7",
    ),
    Mutant("no ping is sent", SESSION, "            calls.send(Ping(), now)\n", "            pass\n", source="8"),
    Mutant(
        "a hanging server is not noticed",
        "client/keepalive.py",
        "return self._step_count > PING_TIMEOUT_STEPS",
        "return False",
        source="8",
    ),
    Mutant(
        "only pong shows that the server works",
        SESSION,
        "        self.calls.keepalive.on_message(now)\n        try:",
        "        if b'pong' in data:\n            self.calls.keepalive.on_message(now)\n        try:",
        source="8",
    ),
    Mutant(
        "the pingInterval of the server is ignored",
        SESSION,
        "        keepalive.set_interval(welcome.pingInterval / 1000)\n",
        "        keepalive.set_interval(20)\n",
        source="8",
    ),
    Mutant(
        "there is no wait between rounds",
        "client/failover.py",
        "self.next_round_delay_s = self._backoff.next_delay()",
        "pass",
        source="9",
    ),
    Mutant(
        "the waits do not grow",
        "backoff.py",
        "min(2 * self._next_s, self._max_s)",
        "min(self._next_s, self._max_s)",
        source="9",
    ),
    Mutant("the leader is ignored", "client/failover.py", "if leader:", "if False:", source="9"),
    Mutant(
        "redirects are followed without an end",
        "client/failover.py",
        "leader not in self._tried and self._redirects < MAX_REDIRECTS",
        "self._redirects < 1000",
        source="9",
    ),
    Mutant(
        "only the first address is tried",
        "client/failover.py",
        "remaining = list(servers.addresses)",
        "remaining = servers.addresses[:1]",
        source="9",
    ),
    Mutant(
        "unavailable fails a request",
        SESSION,
        "            if not isinstance(error, Unavailable):\n",
        "            if True:\n",
        source="9",
    ),
    Mutant(
        "commands are sent before pong",
        SESSION,
        "                    self._begin_resumption(message.payload, now)\n",
        "                    self._begin_resumption(message.payload, now)\n                    self._finish_resumption(now)\n",
        source="10",
    ),
    Mutant(
        "requests are not repeated",
        REQUESTS,
        "                self._send(request, now)\n\n    def keep_locks",
        "                pass\n\n    def keep_locks",
        source="10",
    ),
    Mutant(
        "releases are not repeated",
        REQUESTS,
        "        for release in deferred:\n",
        "        for release in ():\n",
        source="10",
    ),
    Mutant(
        "locks of an ended session are not released",
        REQUESTS,
        "        self._calls.deferred_releases.append(Release(request.id))\n        self._lose(",
        "        self._lose(",
        source="10",
    ),
    Mutant(
        "a lock that the server does not mention is kept",
        REQUESTS,
        "            elif request.connection_number != connection_number:\n                self._lose_unreported",
        "            elif False:\n                self._lose_unreported",
        source="10",
    ),
    Mutant(
        "watches are not begun again",
        SESSION,
        "        self.requests.keep_locks(now)\n        self.watches.send_needed(now)\n",
        "        self.requests.keep_locks(now)\n",
        source="10",
    ),
    Mutant(
        "a snapshot is not compared",
        "client/watches.py",
        "        if not truncated or sum(map(len, self.held_locks.values())) > MAX_UNLISTED_LOCKS:\n",
        "        if False:\n",
        source="10",
    ),
    Mutant(
        "unknown-id fails a repeated release",
        REQUESTS,
        "if isinstance(call, Release) and call.maybe_executed and own_request is not None:",
        "if False:",
        source="10",
    ),
    Mutant(
        "one final answer is enough",
        HANDSHAKE,
        "self._rejection = rejections[-1] if is_rejected_by_all else None",
        "self._rejection = next((r for r in rejections if r is not None), None)",
        source="11",
    ),
    Mutant(
        "final errors are tried again",
        HANDSHAKE,
        "frozenset({Code.UNAUTHORIZED, Code.UNKNOWN_NAMESPACE, Code.UNSUPPORTED_PROTOCOL})",
        "frozenset[Code]()",
        source="11",
    ),
    Mutant("the cycle is lost", "client/errors.py", "cycle=released.cycle, waits", "cycle=[], waits", source="12"),
    Mutant("deadlock is an unknown reason", "client/errors.py", 'case "deadlock":', 'case "dead-lock":', source="12"),
    Mutant(
        "a timeout of a lock is not reported",
        REQUESTS,
        "        if state is HELD or lost_before_release:",
        "        if lost_before_release and state is not HELD:",
        source="13",
    ),
    Mutant(
        "a lost lock can be extended",
        "client/aio.py",
        "            await self._connection.call(extend)\n        self._check_extended()",
        "            await self._connection.call(extend)",
        source="13",
    ),
    Mutant(
        "close sends no bye",
        "client/aio_connection.py",
        "            if self.session.handshake.phase in (Phase.RESUMING, UP):",
        "            if False:",
        source="14",
    ),
    Mutant(
        "close does not wait for bye",
        "client/aio_connection.py",
        "                    await self._send_and_wait(Bye())",
        "                    self.send(Bye(), self._loop.create_future())",
        source="14",
    ),
    Mutant(
        "close waits too long for bye",
        "client/aio_connection.py",
        "min(BYE_TIMEOUT_S, self.session.calls.response_timeout)",
        "1000",
        source="14",
    ),
    Mutant(
        "an unknown command ends the connection",
        SESSION,
        "                self._handle_hello_reply(message, now)\n",
        "                self._handle_hello_reply(message, now)\n"
        "            case None:\n                self.handshake.request_close('an unknown message')\n",
        source="15",
    ),
    Mutant(
        "an unknown reason is ignored",
        REQUESTS,
        "        if request is not None:\n            self._on_ended(request, released)\n        if isinstance(call, Extend):",
        "        if request is not None and released.reason in errors.__doc__ + 'success transaction-timeout disconnected':\n"
        "            self._on_ended(request, released)\n        if isinstance(call, Extend):",
        source="15",
    ),
    Mutant(
        "great weights are sent as numbers",
        "client/commands.py",
        "max([target, *(weights or ())]) > MAX_WEIGHT",
        "False",
        source="16",
    ),
    Mutant(
        "fractions are cut off",
        "client/commands.py",
        "return int(ms) if ms == int(ms) else ms",
        "return int(ms)",
        source="16",
    ),
    Mutant(
        "the session timeout counts from the end of the connection that the client has noticed",
        "client/keepalive.py",
        "self.ends_at = max(self.ends_at, sent_at + self.timeout_s)\n\n    def stop(self) -> None:\n",
        "self.ends_at = math.inf\n\n    def stop(self) -> None:\n"
        '        self.ends_at = __import__("time").monotonic() + self.timeout_s\n',
        source="17",
    ),
    Mutant(
        "any message renews the lease",
        SESSION,
        "        self.calls.keepalive.on_message(now)\n",
        "        self.calls.keepalive.on_message(now)\n        self.requests.lease.renew(now)\n",
        source="17",
    ),
    Mutant(
        "the lease counts from the answer",
        SESSION,
        "self.requests.lease.renew(ping.sent_at)",
        'self.requests.lease.renew(__import__("time").monotonic())',
        source="17",
    ),
    Mutant(
        "only the keepalive sends pings",
        REQUESTS,
        "            return self.lease.on_timer(now)",
        "            self.lease.on_timer(now)",
        source="17",
    ),
    Mutant(
        "the pings ignore the session timeout",
        "client/keepalive.py",
        "self._ping_interval_s = min(seconds, self.timeout_s / 3)",
        "self._ping_interval_s = seconds",
        source="17",
    ),
    Mutant(
        "a lock whose lease has ended is not released",
        REQUESTS,
        "if session_ended or not is_confirmed or",
        "if not session_ended and not is_confirmed or",
        source="17",
    ),
    Mutant(
        "the client takes its session back for ever",
        HANDSHAKE,
        "        if self._takeovers < MAX_TAKEOVERS:",
        "        if True:",
        source="18",
    ),
    Mutant(
        "the first takeover ends the client",
        HANDSHAKE,
        "MAX_TAKEOVERS: Final = 3",
        "MAX_TAKEOVERS: Final = 1",
        source="18",
    ),
    Mutant(
        "the units of blockers are lost",
        "protocol/messages.py",
        "            self.units,\n            self.of,\n",
        "",
        source="4",
    ),
    Mutant(
        "repeated units are not added up",
        "protocol/resources.py",
        "            asked = min(count + other_count, merged_limit), merged_limit\n",
        "            asked = count, merged_limit\n",
        source="4",
    ),
    Mutant(
        "a watch ignores the subtrees above its prefix",
        "client/watches.py",
        "is_subtree(resource) and prefix.startswith(",
        "False and prefix.startswith(",
        source="2",
    ),
]

SERVER_MUTANTS: Final = [
    Mutant(
        "blockers lack their units",
        "protocol/replies.py",
        "    if blocker.units is not None:",
        "    if False:",
        source="Units",
    ),
    Mutant(
        "repeated units are replaced",
        "protocol/resources.py",
        "total = count + other_count",
        "total = other_count",
        source="Units",
    ),
    Mutant(
        "the waits of a deadlock lack their units",
        "protocol/replies.py",
        "    if wait.units is not None:",
        "    if False:",
        source="Deadlocks",
    ),
    Mutant(
        "watches below a subtree get no events",
        "server/watch_events.py",
        "if request.details is not None and request.details.subtrees:",
        "if False:",
        source="Subtrees",
    ),
    Mutant(
        "every name outside a subtree is below it",
        "core/special.py",
        "    return name.startswith(subtree[:-2]) and name != subtree",
        "    return name != subtree",
        source="Subtrees",
    ),
    Mutant(
        "inspect of a name omits the subtrees that contain it",
        "core/view.py",
        "    if not table.subtrees:\n        return Matches(",
        "    if True:\n        return Matches(",
        source="inspect",
    ),
    Mutant(
        "a subtree can be chosen",
        "protocol/resources.py",
        '    if subtrees := [name for name in modes if name[-2:] == "**" and is_subtree(name)]:',
        "    if subtrees := []:",
        source="Subtrees",
    ),
    Mutant(
        "a connection whose session was taken over gets no reason",
        DISPATCHER,
        "        self.outcome.send(connection, replies.error(TAKEN_OVER))\n",
        "",
        source="Sessions",
    ),
    Mutant(
        "locked after a wait lacks the blockers",
        "server/notifier.py",
        "                    if first_blockers is None\n",
        "                    if True\n",
        source="Trace context",
    ),
    Mutant(
        "an incomplete line is dropped",
        "protocol/framing.py",
        "        self.partial += incomplete\n        return lines",
        "        return lines",
        source="Transport",
    ),
    Mutant(
        "every protocol is accepted",
        "protocol/commands.py",
        "    if command.protocol != limits.PROTOCOL:",
        "    if False:",
        source="hello",
    ),
    Mutant(
        "queued is sent to a quiet connection",
        "server/notifier.py",
        "        if request.ref is None or not session.quiet:\n            self.outcome.send(session.connection, replies.queued",
        "        if True:\n            self.outcome.send(session.connection, replies.queued",
        source="hello",
    ),
    Mutant(
        "a rejected hello is forgotten",
        "server/connection.py",
        '            self._reject_line(line, unavailable(line, "hello was rejected; send another hello first"))',
        "            return True",
        source="hello",
    ),
    Mutant(
        "the namespace of a command is ignored",
        DISPATCHER,
        "            if command.namespace == self._namespace:",
        "            if True:",
        source="Namespaces",
    ),
    Mutant(
        "shared locks ignore an exclusive one",
        "core/grant.py",
        "    return resource.exclusive_count > 0 and not own_grants",
        "    return False",
        source="request",
    ),
    Mutant(
        "a queue times out early",
        "core/manager.py",
        "request.deadline = ceil(now + timeout_ms)",
        "request.deadline = ceil(now + timeout_ms - 60)",
        source="Reasons",
    ),
    Mutant(
        "a lock times out early",
        "core/manager.py",
        "request.deadline = ceil(now + request.transaction_timeout_ms)\n        self.deadlines.add(request.deadline, request.id)",
        "request.deadline = ceil(now + request.transaction_timeout_ms - 60)\n        self.deadlines.add(request.deadline, request.id)",
        source="Reasons",
    ),
    Mutant(
        "the owner of an expired lock is not notified",
        "server/notifier.py",
        "            self.outcome.send(session.connection, message)\n        if requester",
        "            pass\n        if requester",
        source="Reasons",
    ),
    Mutant(
        "a repeated ref is a new request",
        DISPATCHER,
        "                if command.ref is not None and (earlier := session.find(command.ref)) is not None:",
        "                if False and (earlier := session.find(command.ref or '')) is not None:",
        source="Repeating a request",
    ),
    Mutant(
        "a repeated ref with another payload is accepted",
        DISPATCHER,
        "if not _may_be_retry(request, earlier):",
        "if False:",
        source="Repeating a request",
    ),
    Mutant(
        "less than the target is granted",
        "core/manager.py",
        "if reached >= take.target:",
        "if reached > 0:",
        source="Any of these",
    ),
    Mutant(
        "the answer to a release carries the ref of the request",
        DISPATCHER,
        "outbox.append(success(request.id, command.ref))",
        "outbox.append(success(request.id, request.ref))",
        source="release",
    ),
    Mutant(
        "a release by ref is not known",
        DISPATCHER,
        "        found = connection.session.find(command.ref)\n        if found is None:",
        "        found = None\n        if found is None:",
        source="release",
    ),
    Mutant(
        "an extension is not executed",
        DISPATCHER,
        "            notifier.handle_events(self._step(command, now), now, connection, command.ref)\n        elif type(command) is Ping:",
        "            pass\n        elif type(command) is Ping:",
        source="extend",
    ),
    Mutant(
        "pong lacks the ref",
        DISPATCHER,
        'replies.bare("pong", command.ref)',
        'replies.bare("pong", None)',
        source="ping",
    ),
    Mutant(
        "the limit is ignored",
        DISPATCHER,
        "            limit=command.limit,",
        "            limit=1000,",
        source="inspect",
    ),
    Mutant("only is ignored", DISPATCHER, "            only=command.only,", "            only=None,", source="inspect"),
    Mutant(
        "the end of a lock is no event",
        DISPATCHER,
        '                    self.watch_events.publish(request, "unlocked")',
        "                    pass",
        source="watch",
    ),
    Mutant(
        "any number of prefixes is watched",
        "server/watches.py",
        "len(watched) >= MAX_WATCHES",
        "len(watched) >= 10**9",
        source="watch",
    ),
    Mutant(
        "unwatched lacks the ref",
        DISPATCHER,
        "replies.unwatched(command.prefix, command.ref)",
        "replies.unwatched(command.prefix, None)",
        source="Matching answers by ref",
    ),
    Mutant(
        "a watch goes on",
        DISPATCHER,
        "            self.watches.remove(connection, command.prefix)\n",
        "",
        source="unwatch",
    ),
    Mutant(
        "bye leaves the waiting requests",
        DISPATCHER,
        "        if not self._end_session(session, now, principal_name(connection)):\n            return False\n        self.outcome",
        "        self.outcome",
        source="bye",
    ),
    Mutant(
        "the connection stays open after bye",
        DISPATCHER,
        "        connection.detach()\n        self.outcome.closing.append(connection)",
        "        connection.detach()",
        source="bye",
    ),
    Mutant(
        "a rejection lacks the ref",
        "server/notifier.py",
        "Code.UNKNOWN_ID, reason, ref=ref, id=event.id",
        "Code.UNKNOWN_ID, reason, id=event.id",
        source="release",
    ),
    Mutant(
        "requests overtake waiters",
        "core/grant.py",
        "    if resource.wait_queue is not None:\n        return False",
        "",
        source="The queue",
    ),
    Mutant(
        "deadlocks are not detected",
        "core/manager.py",
        "deadlock.may_create_cycle(table, request)",
        "False",
        source="Deadlocks",
    ),
    Mutant(
        "waiting requests outlive their connection",
        DISPATCHER,
        "        elif session.bound or session.ending:\n",
        "        elif False:\n",
        source="When a connection ends",
    ),
    Mutant(
        "a resumed session gets no live requests",
        "server/sessions.py",
        "self._requests = [*reversed(session.bound.values())]",
        "self._requests = []",
        source="Sessions",
    ),
    Mutant(
        "a resumed session gets no retained replies",
        "server/sessions.py",
        "self._replies = [*session.unreceived_replies()]",
        "self._replies = []",
        source="Sessions",
    ),
    Mutant(
        "every held lock ends with its session",
        "server/sessions.py",
        "                kept.append(request)\n        self._kept_count",
        "                released.append(request)\n        self._kept_count",
        source="Sessions",
    ),
    Mutant(
        "the first line may be long",
        "server/auth.py",
        "self._max_bytes = MAX_HELLO_BYTES if principal is None else max_line",
        "self._max_bytes = max_line",
        source=TOKENS,
    ),
    Mutant(
        "a connection without a token stays open",
        "server/connection.py",
        "    def reject_unauthenticated(self, denial: Denial = NO_HELLO) -> None:\n",
        "    def reject_unauthenticated(self, denial: Denial = NO_HELLO) -> None:\n        return\n\n"
        "    def _unused(self, denial: Denial = NO_HELLO) -> None:\n",
        source=TOKENS,
    ),
    Mutant(
        "HTTP requests are commands",
        "server/connection.py",
        "AWAIT_HELLO and is_http(line)",
        "AWAIT_HELLO and False",
        source="Errors",
    ),
    Mutant(
        "lines may have 4 MiB",
        "config.py",
        "max_line: int = MAX_LINE_BYTES",
        "max_line: int = 4 * MAX_LINE_BYTES",
        source="Limits",
    ),
]

MUTANTS: Final = [*CLIENT_MUTANTS, *SERVER_MUTANTS]


def detect(mutant: Mutant) -> str:
    """Run the cases of a mutant's rule or section. Return the failed cases, or "" if none failed."""
    options = ["--json", "--limit", LIMIT_S, "--filter", mutant.source]
    with mutated(mutant, "genie", "conformance") as folder:
        if mutant in CLIENT_MUTANTS:
            command = ["--", sys.executable, "-m", "conformance.adapters.asyncio_client"]
            return failed_cases(folder, ["client", *options, *command])
        token = CREDENTIAL if mutant.source == TOKENS else ""
        options += ["--token", token] if token else []
        with running_server(folder, token) as address:
            return failed_cases(folder, ["server", *options, address])


def failed_cases(folder: Path, arguments: Sequence[str]) -> str:
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
        raise NotRunError(f"CRASHES: {(process.stderr.strip().splitlines() or [''])[-1]}")
    results: dict[str, Any] = json.loads(process.stdout)
    return ", ".join(case["name"] for case in results["cases"] if case["outcome"] == "failed")


@contextmanager
def running_server(folder: Path, token: str) -> Iterator[str]:
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


if __name__ == "__main__":
    sys.exit(main(MUTANTS, detect, __doc__))
