"""What is watched, by literal lines: the picture, the difference after a gap, and what is said to the server."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from genie import Change
from genie.client import watches
from genie.client.commands import Ping
from genie.client.session import ClientSession
from genie.client.watches import Watch
from genie.errors import RequestRejected
from scripted_server import SECRET, InOrder, cut, error, greet, held, released, say
from scripted_server import connected as connected_core

PING = say("ping")
PONG = say("pong")


def connected(*, watching: bool = False) -> ClientSession:
    return connected_core(InOrder, watching=watching)


def row(resource: str, id: int = 1, transaction: str | None = None, mode: str = "exclusive") -> dict[str, object]:
    name = {} if transaction is None else {"transactionName": transaction}
    return {"resource": resource, "mode": mode, "id": id, **name}


def watching(*rows: dict[str, object], prefix: str = "t/", truncated: bool = False) -> bytes:
    return say("watching", prefix=prefix, held=rows, truncated=truncated)


def event(state: str, resource: str, id: int = 1, transaction: str | None = None, mode: str = "exclusive") -> bytes:
    return say("event", state=state, **row(resource, id, transaction, mode))


def watch_line(prefix: str = "t/") -> bytes:
    return say("watch", prefix=prefix)


def unwatch_line(prefix: str = "t/") -> bytes:
    return say("unwatch", prefix=prefix)


LAGGED = say("event", state="lagged")


def wanted(session: ClientSession, prefix: str = "t/") -> Watch:
    watch = Watch(prefix)
    session.request_next(watch, 0.0)
    return watch


def watched(session: ClientSession, *rows: dict[str, object], prefix: str = "t/", truncated: bool = False) -> Watch:
    """A watch that the server has answered, with all that it told taken; nobody waits for more of it just now."""
    watch = wanted(session, prefix)
    assert session.data_to_send() == watch_line(prefix)
    outcomes = session.receive_data(watching(*rows, prefix=prefix, truncated=truncated), 0.0)
    assert outcomes == ([(watch, None, None)] if rows else [])
    take(watch)
    watch.wants_next = False
    return watch


def take(watch: Watch) -> list[str]:
    """What there is to take, in words."""
    found = [f"{change.state} {change.mode} {change.resource} {change.id}" for change in watch.changes]
    watch.changes.clear()
    return found


def locks(*names: str) -> list[str]:
    return [f"locked exclusive {name}" for name in names]


def unlocks(*names: str) -> list[str]:
    return [f"unlocked exclusive {name}" for name in names]


class TestTelling:
    def test_begins_with_what_is_held_and_goes_on_with_what_happens(self):
        session = connected()
        watch = wanted(session)
        assert session.data_to_send() == watch_line()
        told = watching(row("t/1", 5, "tx"), row("t/2", 6, mode="shared"), row("t/2", 7, mode="shared"))
        assert session.receive_data(told, 0.0) == [(watch, None, None)]
        assert list(watch.changes) == [
            Change("t/1", "locked", "exclusive", 5, "tx"),
            Change("t/2", "locked", "shared", 6),
            Change("t/2", "locked", "shared", 7),
        ]
        watch.changes.clear()
        session.request_next(watch, 0.0)
        assert session.data_to_send() == b"", "it is told already"
        told = event("unlocked", "t/1", 5) + event("locked", "t/1", 8, "ty") + event("locked", "t/2", 9)
        assert session.receive_data(told, 0.0) == [(watch, None, None)], "whoever waits is told once"
        assert list(watch.changes)[:2] == [
            Change("t/1", "unlocked", "exclusive", 5, "tx"),
            Change("t/1", "locked", "exclusive", 8, "ty"),
        ]

    def test_says_nothing_where_nothing_is_held(self):
        session = connected()
        watch = wanted(session)
        assert session.receive_data(watching(), 0.0) == []
        assert session.receive_data(event("locked", "t/1"), 0.0) == [(watch, None, None)]
        assert take(watch) == locks("t/1 1")

    def test_is_of_names_that_begin_so(self):
        session = connected()
        watch, wide, all_ = watched(session), watched(session, prefix="t"), watched(session, prefix="")
        session.receive_data(event("locked", "t/1") + event("locked", "t2", 2) + event("locked", "u", 3), 0.0)
        assert take(watch) == locks("t/1 1")
        assert take(wide) == locks("t/1 1", "t2 2")
        assert take(all_) == locks("t/1 1", "t2 2", "u 3")

    def test_does_not_tell_again_what_it_has_told(self):
        session = connected()
        watch = watched(session, row("t/1"))
        session.receive_data(event("locked", "t/1") + event("unlocked", "t/2", 9) + event("unlocked", "t/1") * 2, 0.0)
        assert take(watch) == unlocks("t/1 1")

    def test_lets_states_of_tomorrow_pass(self):
        session = connected()
        watch = watched(session, row("t/1"))
        assert session.receive_data(event("frozen", "t/1") + event("frozen", "t/2"), 0.0) == []
        assert take(watch) == []

    @pytest.mark.parametrize(
        ("before", "after", "ends"),
        [
            (row("t/1", 1), row("t/1", 2), True),
            (row("t/1", 1, "tx"), row("t/1", 2, "ty"), True),
            (row("t/1", 1, "tx"), row("t/1", 2, "tx"), False),
            (row("t/1", 1, mode="shared"), row("t/1", 2), True),
            (row("t/1", 1), row("t/1", 2, mode="shared"), True),
            (row("t/1", 1, mode="shared"), row("t/1", 2, mode="shared"), False),
        ],
    )
    def test_never_shows_together_what_can_not_be_held_together(self, before, after, ends):
        session = connected()
        watch = watched(session, before)
        session.receive_data(say("event", state="locked", **after), 0.0)
        assert take(watch) == [
            *([f"unlocked {before['mode']} t/1 1"] if ends else []),
            f"locked {after['mode']} t/1 2",
        ]
        session.receive_data(event("unlocked", "t/1", 1), 0.0)
        assert take(watch) == ([] if ends else [f"unlocked {before['mode']} t/1 1"])


class TestTwoOfOnePrefix:
    def test_have_pictures_of_their_own(self):
        session = connected()
        first = watched(session, row("t/1"))
        second = wanted(session)
        assert session.data_to_send() == watch_line()
        session.receive_data(event("locked", "t/2", 2), 0.0)
        assert take(first) == locks("t/2 2")
        assert session.receive_data(watching(row("t/1"), row("t/2", 2)), 0.0) == [(second, None, None)]
        assert take(first) == []
        assert take(second) == locks("t/1 1", "t/2 2")
        session.receive_data(event("unlocked", "t/1"), 0.0)
        assert take(first) == take(second) == unlocks("t/1 1")

    def test_the_last_one_says_that_it_is_over(self):
        session = connected()
        first, second, other = watched(session), watched(session), watched(session, prefix="u")
        assert session.unwatch(first) == []
        assert session.data_to_send() == b""
        session.unwatch(second)
        assert session.data_to_send() == unwatch_line()
        session.unwatch(second)
        assert session.data_to_send() == b""
        assert session.receive_data(say("unwatched", prefix="t/") + event("locked", "t/1"), 0.0) == []
        assert not session.close_reason
        assert take(second) == take(other) == []

    def test_one_that_begins_while_the_last_one_ends_is_asked_for_behind_it(self):
        session = connected()
        session.unwatch(watched(session, row("t/1")))
        watch = wanted(session)
        assert session.data_to_send() == unwatch_line() + watch_line()
        assert session.receive_data(event("unlocked", "t/1") + say("unwatched", prefix="t/"), 0.0) == []
        assert session.receive_data(watching(row("t/2", 2)), 0.0) == [(watch, None, None)]
        assert take(watch) == locks("t/2 2")


class TestEnding:
    def test_wakes_whoever_waits(self):
        session = connected()
        watch = watched(session)
        session.request_next(watch, 0.0)
        assert session.unwatch(watch) == [(watch, None, None)]
        assert watch.ended

    def test_before_the_answer_leaves_nothing_behind(self):
        session = connected()
        watch = wanted(session)
        session.unwatch(watch)
        assert session.data_to_send() == watch_line() + unwatch_line()
        assert (
            session.receive_data(watching(row("t/1")) + event("locked", "t/2") + say("unwatched", prefix="t/"), 0.0)
            == []
        )
        assert not watch.changes
        assert not session.close_reason
        assert cut(session) == []
        assert session.data_to_send() == b""

    def test_of_one_that_was_never_wanted_says_nothing(self):
        session = connected()
        assert session.unwatch(Watch("t/")) == []
        assert session.data_to_send() == b""

    def test_comes_with_that_of_the_client(self):
        session = connected()
        first, second = watched(session, row("t/1")), watched(session)
        session.request_next(second, 0.0)
        session.receive_data(event("unlocked", "t/1"), 0.0)
        assert session.begin_close(0.0) == [(second, None, None)]
        assert first.ended
        assert second.ended
        assert not first.changes

    @pytest.mark.parametrize("code", ["bad-request", "too-many", "unknown-command"])
    def test_by_a_refusal(self, code):
        session = connected()
        first, ping = watched(session), Ping()
        session.send(ping, 0.0)
        watch = wanted(session)
        assert session.receive_data(PONG, 0.0) == [(ping, None, None)]
        [(call, _, refusal)] = session.receive_data(error(code), 0.0)
        assert call is watch
        assert isinstance(refusal, RequestRejected)
        assert (watch.ended, first.ended) == (True, False)
        session.data_to_send()
        session.receive_data(event("locked", "t/1"), 0.0)
        assert take(first) == locks("t/1 1")
        cut(session)
        session.request_next(first, 0.0)
        assert session.data_to_send() == watch_line()

    def test_by_a_refusal_leaves_the_server_alone(self):
        session = connected(watching=True)
        wanted(session)
        session.data_to_send()
        session.receive_data(error("too-many"), 0.0)
        session.on_timer(2.0)
        assert session.data_to_send() == b""

    def test_by_a_refusal_that_nobody_waits_for_any_more(self):
        session = connected()
        session.unwatch(wanted(session))
        assert session.receive_data(error("too-many") + say("unwatched", prefix="t/"), 0.0) == []
        assert not session.close_reason


def test_an_answer_that_nothing_waits_for_is_ignored():
    for line in (watching(row("t/1")), say("unwatched", prefix="t/")):
        session = connected()
        assert session.receive_data(line, 0.0) == []
        assert not session.close_reason


class TestAfterAGap:
    def test_the_difference_is_told(self):
        session = connected()
        watch = watched(session, row("t/1", 1), row("t/2", 2), row("t/3", 3), row("t/4", 4))
        session.request_next(watch, 0.0)
        cut(session)
        assert session.data_to_send() == watch_line()
        told = watching(row("t/2", 2), row("t/3", 5), row("t/4", 4), row("t/6", 6))
        assert session.receive_data(told, 0.0) == [(watch, None, None)]
        assert take(watch) == unlocks("t/1 1", "t/3 3") + locks("t/3 5", "t/6 6")

    def test_no_difference_is_none(self):
        session = connected()
        watch = watched(session, row("t/1"))
        session.request_next(watch, 0.0)
        cut(session)
        assert session.receive_data(watching(row("t/1")), 0.0) == []
        assert session.receive_data(event("unlocked", "t/1"), 0.0) == [(watch, None, None)]

    def test_what_was_not_taken_yet_is_still_told(self):
        session = connected()
        watch = watched(session)
        session.receive_data(event("locked", "t/1"), 0.0)
        cut(session, resumed=False)
        assert session.data_to_send() == b"", "it is asked for when more is wanted"
        session.receive_data(event("locked", "t/9", 9), 0.0)
        assert take(watch) == locks("t/1 1")
        session.request_next(watch, 0.0)
        assert session.data_to_send() == watch_line()
        session.receive_data(watching(), 0.0)
        assert take(watch) == unlocks("t/1 1")

    def test_nothing_is_said_before_there_is_a_connection(self):
        session = InOrder(SECRET)
        watch = wanted(session)
        assert session.data_to_send() == b""
        greet(session, resumed=False)
        assert session.data_to_send() == watch_line()
        assert cut(session) == [], "the answer is lost"
        assert session.data_to_send() == watch_line()
        assert session.receive_data(watching(row("t/1")), 0.0) == [(watch, None, None)]

    def test_a_server_that_does_not_lead_is_left_and_the_next_is_asked(self):
        session = connected()
        wanted(session)
        session.data_to_send()
        assert session.receive_data(error("unavailable", leader="b:1"), 0.0) == []
        assert session.close_reason
        assert session.redirect == "b:1"
        cut(session)
        assert session.data_to_send() == watch_line()

    def test_that_the_server_makes_all_is_asked_for_anew(self):
        session = connected()
        watch, other = watched(session, row("t/1")), watched(session, prefix="u")
        session.request_next(watch, 0.0)
        assert session.receive_data(LAGGED, 0.0) == []
        assert session.data_to_send() == watch_line(), "the other one is not wanted now"
        assert session.receive_data(event("locked", "u", 3) + watching(row("t/2", 2)), 0.0) == [(watch, None, None)]
        assert take(watch) == unlocks("t/1 1") + locks("t/2 2")
        session.request_next(other, 0.0)
        assert session.data_to_send() == watch_line("u")
        session.unwatch(other)
        assert session.data_to_send() == unwatch_line("u")

    def test_that_the_server_makes_is_none_for_what_it_has_not_answered(self):
        session = connected()
        watch = wanted(session)
        assert session.data_to_send() == watch_line()
        session.receive_data(LAGGED + watching(), 0.0)
        assert session.data_to_send() == b""
        session.receive_data(event("locked", "t/1"), 0.0)
        assert take(watch) == locks("t/1 1")

    def test_one_that_has_ended_at_the_server_is_not_ended_again(self):
        session = connected()
        watch = watched(session)
        session.receive_data(LAGGED, 0.0)
        session.unwatch(watch)
        assert session.data_to_send() == b""

    def test_of_a_slow_taker(self, monkeypatch):
        monkeypatch.setattr(watches, "MAX_BUFFERED_CHANGES", 3)
        session = connected()
        watch = watched(session)
        session.receive_data(b"".join(event("locked", f"t/{id_}", id_) for id_ in range(1, 6)), 0.0)
        assert session.data_to_send() == b""
        assert take(watch) == locks("t/1 1", "t/2 2", "t/3 3")
        session.receive_data(event("unlocked", "t/1"), 0.0)
        assert take(watch) == []
        session.request_next(watch, 0.0)
        assert session.data_to_send() == watch_line()
        session.receive_data(watching(*(row(f"t/{id_}", id_) for id_ in (2, 3, 5, 6, 7, 8))), 0.0)
        assert take(watch) == unlocks("t/1 1") + locks("t/5 5", "t/6 6", "t/7 7", "t/8 8")
        session.unwatch(watch)
        assert session.data_to_send() == unwatch_line()


class TestTruncated:
    def test_is_said(self):
        session = connected()
        assert watched(session, row("t/1"), truncated=True).truncated
        assert not watched(session, row("t/1")).truncated

    def test_does_not_end_what_it_does_not_tell(self):
        session = connected()
        watch = watched(session, row("t/1", 1), row("t/2", 2), row("t/3", 3))
        session.request_next(watch, 0.0)
        cut(session)
        session.receive_data(watching(row("t/2", 8), row("t/4", 4), truncated=True), 0.0)
        assert watch.truncated
        assert take(watch) == unlocks("t/2 2") + locks("t/2 8", "t/4 4")
        session.receive_data(event("unlocked", "t/1") + event("locked", "t/3", 9), 0.0)
        assert take(watch) == unlocks("t/1 1", "t/3 3") + locks("t/3 9")

    def test_is_over_with_the_next_answer_that_is_whole(self):
        session = connected()
        watch = watched(session, row("t/1", 1), row("t/2", 2), truncated=True)
        session.request_next(watch, 0.0)
        cut(session)
        session.receive_data(watching(row("t/1", 1)), 0.0)
        assert not watch.truncated
        assert take(watch) == unlocks("t/2 2")


class TestSilence:
    def test_is_noticed_while_something_is_watched(self):
        session = connected(watching=True)
        watch = watched(session)
        assert session.on_timer(2.0) == []
        assert session.data_to_send() == PING
        session.receive_data(PONG, 2.0)
        for now in (4.0, 5.0, 6.0, 7.0):
            session.on_timer(now)
        assert session.close_reason
        session.on_disconnected("silent", 0.0)
        session.unwatch(watch)
        greet(session, now=8.0)
        session.on_timer(10.0)
        assert session.data_to_send() == b""

    def test_is_noticed_behind_a_reconnect_too(self):
        session = connected(watching=True)
        watched(session)
        cut(session, now=1.0)
        session.on_timer(3.0)
        assert session.data_to_send() == PING


def test_locks_of_ones_own_are_none_of_its_business():
    session = connected()
    request = held(session)
    watch = watched(session, row("a", 101), prefix="a")
    release = session.release(request, 0.0)
    release.waiter = Future()
    session.receive_data(event("unlocked", "a", 101), 0.0)
    assert session.receive_data(released(101, "success", release.ref), 0.0) == [(release, "success", None)]
    assert take(watch) == unlocks("a 101")


@pytest.mark.parametrize("prefix", ["x" * 513, "a\nb", "\ud800"])
def test_a_prefix_that_the_server_would_refuse(prefix):
    with pytest.raises(ValueError, match=r"prefix|surrogate"):
        Watch(prefix)
