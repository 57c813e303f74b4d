"""The calls of a session: sends them, matches each reply with its call, and collects the outcomes.

Every command has a `ref`, and the reply has the same `ref`. A reply with an unknown `ref` is ignored.

A call that is made without a connection waits for the next one. A call without a reply fails with its connection, except for
releases and watches, which are sent again. Requests are sent by `Requests`, which also matches their replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from genie.client.commands import Call, Outcome, Release, TimedCall
from genie.client.handshake import UP, Handshake
from genie.client.keepalive import Keepalive
from genie.errors import ConnectionLost, Unavailable

C = TypeVar("C", bound=Call)


class Calls:
    """The calls of a client other than its requests.

    Args:
        handshake: the state of the connection.
        response_timeout: seconds that a caller waits for a server.
        explain_unavailable: returns why there is no connection, for error messages.

    """

    def __init__(self, handshake: Handshake, response_timeout: float, explain_unavailable: Callable[[], str]) -> None:
        self.response_timeout = response_timeout
        self.unsent_lines: list[bytes] = []
        """Encoded commands that the I/O layer has not written yet."""
        self.outcomes: list[Outcome] = []
        """The outcomes that the session returns to the I/O layer next."""
        self.pending: dict[str, Call] = {}
        """The calls that were sent on this connection and have no reply yet, by their `ref`. A release that has the `ref` of
        its request in place of an id is not among them."""
        self.deferred: dict[Call, None] = {}
        """An ordered set of the calls that wait for the next connection, except for releases. `limit_wait` limits how long their
        callers wait. Not a list, because thousands of callers may be cancelled together, in any order."""
        self.deferred_releases: list[Release] = []
        """Releases by id that must be sent on the next connection."""
        self.keepalive = Keepalive()
        self.next_deadline = math.inf
        """When `on_timer` must be called, in seconds of the monotonic clock. Infinite while no caller waits."""
        self._deadlines: dict[Call, float] = {}
        """When the caller of each call gives up, the earliest first. One timer serves all callers, because a timer for each
        release would take longer than encoding the release."""
        self._handshake = handshake
        self.ref_prefix = ""
        """The beginning of every `ref`. Each client with a given secret has another prefix, because a later client with the
        same secret must not use the `ref` of an earlier one."""
        self._ref_numbers = count(1)
        self._explain_unavailable = explain_unavailable

    def new_ref(self) -> str:
        """Return a new `ref`: the text that identifies a command and its reply. Thread-safe."""
        return f"{self.ref_prefix}{next(self._ref_numbers)}"

    def send(self, call: Call, now: float) -> None:
        """Send a call, now or on the next connection. The call gets a new `ref` if it has none."""
        if self._handshake.phase is not UP:
            if isinstance(call, Release):
                self.deferred_releases.append(call)
            else:
                self.deferred[call] = None
            return
        self.keepalive.start(now)
        if isinstance(call, TimedCall):
            call.sent_at = now
        if not call.ref:
            call.assign_ref(self.new_ref())
        self.pending[call.ref] = call
        self.unsent_lines.append(call.line)

    def pop(self, kind: type[C], ref: str | None) -> C | None:
        """Remove and return the pending call with the `ref` of a reply. Returns None if no call of this kind has the `ref`."""
        call = self.pending.get(ref) if ref is not None else None
        if not isinstance(call, kind):
            return None
        del self.pending[call.ref]
        return call

    # -- callers that wait ----------------------------------------------------------------------------------

    def limit_wait(self, call: Call, now: float) -> None:
        """Fail the caller of a call with Unavailable if there is no outcome within the response timeout."""
        deadline = now + self.response_timeout
        if not self._deadlines or deadline < self.next_deadline:
            self.next_deadline = deadline
        self._deadlines[call] = deadline

    def drop_caller(self, call: Call) -> None:
        """Ignore the outcome of a call, because its caller no longer waits.

        A call that waits for the next connection is not sent any more, unless it is a release.
        """
        call.future = None
        self._deadlines.pop(call, None)
        self.deferred.pop(call, None)

    def on_timer(self, now: float) -> None:
        """Fail the callers that have waited too long. Their releases are still retried in the background."""
        for call, deadline in list(self._deadlines.items()):
            if deadline > now:
                break
            if isinstance(call, Release):
                problem = f"request {call.id} could not be released"
            else:
                problem = f"no answer to {type(call).__name__.lower()}"
            error = self.no_answer_error(f"{problem} within {self.response_timeout:g} s")
            self.outcomes.append(Outcome(call, error=error))
            self.deferred.pop(call, None)
            del self._deadlines[call]
        self.next_deadline = next(iter(self._deadlines.values()), math.inf)

    def no_answer_error(self, problem: str) -> Unavailable:
        """Return the error for a caller that has waited too long: what happened, and why the server did not answer."""
        reason = "the server does not answer" if self._handshake.phase is UP else self._explain_unavailable()
        return Unavailable(f"{problem}: {reason}")

    def take_outcomes(self) -> list[Outcome]:
        """Remove and return the outcomes since the last call of this method. Removes the deadlines of their callers."""
        outcomes, deadlines = self.outcomes, self._deadlines
        self.outcomes = []
        if deadlines:
            for outcome in outcomes:
                deadlines.pop(outcome.call, None)
        return outcomes

    # -- the end of a connection ----------------------------------------------------------------------------

    def on_disconnected(self, reason: str) -> None:
        """Fail the calls without a reply. Releases and watches are sent again on the next connection.

        `reason` is the beginning of the error message: which connection was lost, and why.
        """
        self.keepalive.stop()
        self.unsent_lines.clear()
        pending, self.pending = self.pending, {}
        for call in pending.values():
            if isinstance(call, Release):
                call.maybe_executed = call.request is not None  # matters only for a request of this client
                call.query = None  # all waiting requests are sent again, after the releases
                self.deferred_releases.append(call)
            elif call.fails_with_connection:
                self.outcomes.append(Outcome(call, error=ConnectionLost(f"{reason}, before the reply arrived")))

    def take_deferred(self) -> list[Call]:
        """Remove and return the calls that wait for a connection, except releases."""
        deferred, self.deferred = self.deferred, {}
        return list(deferred)
