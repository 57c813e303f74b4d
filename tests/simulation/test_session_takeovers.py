"""The check of session takeovers: which errors about a takeover it accepts, and which it reports."""

from __future__ import annotations

from typing import Any

from genie.testing.simulation.history import CLIENT_SENT, CONNECTED, SERVER_SENT
from simulator.checkers import check
from simulator.history import ClusterHistory

EARLIER, LATER = 1, 2
"""The numbers of two connections. The earlier one was opened first."""


class Scenario:
    """The history of two connections of a client, which send the secret of the same session."""

    def __init__(self) -> None:
        self.now = 0.0
        self.history = ClusterHistory(lambda: self.now)
        self.connect(EARLIER)
        self.now = 1.0
        self.connect(LATER)
        self.now = 2.0

    def connect(self, number: int) -> None:
        self.history.append(CONNECTED, "c1", "s1.1", number)

    def hello(self, number: int, session: str = "the same secret") -> None:
        payload = {"session": session, "sessionTimeout": 10_000, "ref": "hello"}
        self.history.append(CLIENT_SENT, "c1", {"command": "hello", "payload": payload}, number)

    def send(self, number: int, command: str, **payload: Any) -> None:
        self.history.append(SERVER_SENT, "s1.1", {"command": command, "payload": payload}, number)

    def welcome(self, number: int, *, resumed: bool = True) -> None:
        self.send(number, "welcome", resumed=resumed, ref="hello")

    def close(self, number: int) -> None:
        self.send(number, "error", code="session-taken-over", message="taken over")

    def is_accepted(self) -> bool:
        """Return whether the takeover is accepted. Fails if the checkers find another violation."""
        found = check(self.history)
        takeovers = [text for text in found if "no other connection has resumed the session" in text]
        assert found == takeovers
        return not takeovers


def test_a_later_connection_takes_the_session_over() -> None:
    scenario = Scenario()
    scenario.hello(EARLIER)
    scenario.welcome(EARLIER, resumed=False)
    scenario.hello(LATER)
    scenario.close(EARLIER)
    scenario.welcome(LATER)
    assert scenario.is_accepted()


def test_an_earlier_connection_whose_hello_is_executed_later_takes_the_session_over() -> None:
    """The server sends the error and the `welcome` at the same time, in either order."""
    for is_error_first in (True, False):
        scenario = Scenario()
        scenario.hello(EARLIER)
        scenario.hello(LATER)
        scenario.welcome(LATER)
        scenario.now = 3.0
        if is_error_first:
            scenario.close(LATER)
        scenario.welcome(EARLIER)
        if not is_error_first:
            scenario.close(LATER)
        assert scenario.is_accepted(), is_error_first


def test_a_takeover_without_another_connection_is_reported() -> None:
    for has_other_session in (True, False):
        scenario = Scenario()
        if has_other_session:
            scenario.hello(EARLIER, session="another secret")
            scenario.welcome(EARLIER)
        scenario.hello(LATER)
        scenario.welcome(LATER)
        scenario.now = 3.0
        scenario.close(LATER)
        assert not scenario.is_accepted(), has_other_session


def test_a_takeover_by_a_connection_that_resumed_the_session_before_is_reported() -> None:
    scenario = Scenario()
    scenario.hello(EARLIER)
    scenario.welcome(EARLIER)
    scenario.hello(LATER)
    scenario.now = 3.0
    scenario.close(EARLIER)
    scenario.welcome(LATER)
    scenario.now = 4.0
    scenario.close(LATER)
    assert not scenario.is_accepted()


def test_a_takeover_before_the_other_connection_resumes_the_session_is_reported() -> None:
    scenario = Scenario()
    scenario.hello(EARLIER)
    scenario.hello(LATER)
    scenario.welcome(LATER)
    scenario.now = 3.0
    scenario.close(LATER)
    scenario.now = 3.001
    scenario.welcome(EARLIER)
    assert not scenario.is_accepted()
