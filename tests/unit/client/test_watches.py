"""What is watched, by literal lines: the picture, the difference after a gap, and what is said to the server."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from genie import Change
from genie.client import watches
from genie.client.commands import Ping
from genie.client.session import Core
from genie.client.watches import Watch
from genie.errors import RequestRejected
from talk import SECRET, InOrder, cut, error, greet, held, released, say
from talk import connected as connected_core

PING = say("ping")
PONG = say("pong")


def connected(*, watching: bool = False) -> Core:
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


def wanted(core: Core, prefix: str = "t/") -> Watch:
    watch = Watch(prefix)
    core.want(watch, 0.0)
    return watch


def watched(core: Core, *rows: dict[str, object], prefix: str = "t/", truncated: bool = False) -> Watch:
    """A watch that the server has answered, with all that it told taken; nobody waits for more of it just now."""
    watch = wanted(core, prefix)
    assert core.outgoing() == watch_line(prefix)
    outcomes = core.receive(watching(*rows, prefix=prefix, truncated=truncated), 0.0)
    assert outcomes == ([(watch, None, None)] if rows else [])
    take(watch)
    watch.wanted = False
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
        core = connected()
        watch = wanted(core)
        assert core.outgoing() == watch_line()
        told = watching(row("t/1", 5, "tx"), row("t/2", 6, mode="shared"), row("t/2", 7, mode="shared"))
        assert core.receive(told, 0.0) == [(watch, None, None)]
        assert list(watch.changes) == [
            Change("t/1", "locked", "exclusive", 5, "tx"),
            Change("t/2", "locked", "shared", 6),
            Change("t/2", "locked", "shared", 7),
        ]
        watch.changes.clear()
        core.want(watch, 0.0)
        assert core.outgoing() == b"", "it is told already"
        told = event("unlocked", "t/1", 5) + event("locked", "t/1", 8, "ty") + event("locked", "t/2", 9)
        assert core.receive(told, 0.0) == [(watch, None, None)], "whoever waits is told once"
        assert list(watch.changes)[:2] == [
            Change("t/1", "unlocked", "exclusive", 5, "tx"),
            Change("t/1", "locked", "exclusive", 8, "ty"),
        ]

    def test_says_nothing_where_nothing_is_held(self):
        core = connected()
        watch = wanted(core)
        assert core.receive(watching(), 0.0) == []
        assert core.receive(event("locked", "t/1"), 0.0) == [(watch, None, None)]
        assert take(watch) == locks("t/1 1")

    def test_is_of_names_that_begin_so(self):
        core = connected()
        watch, wide, all_ = watched(core), watched(core, prefix="t"), watched(core, prefix="")
        core.receive(event("locked", "t/1") + event("locked", "t2", 2) + event("locked", "u", 3), 0.0)
        assert take(watch) == locks("t/1 1")
        assert take(wide) == locks("t/1 1", "t2 2")
        assert take(all_) == locks("t/1 1", "t2 2", "u 3")

    def test_does_not_tell_again_what_it_has_told(self):
        core = connected()
        watch = watched(core, row("t/1"))
        core.receive(event("locked", "t/1") + event("unlocked", "t/2", 9) + event("unlocked", "t/1") * 2, 0.0)
        assert take(watch) == unlocks("t/1 1")

    def test_lets_states_of_tomorrow_pass(self):
        core = connected()
        watch = watched(core, row("t/1"))
        assert core.receive(event("frozen", "t/1") + event("frozen", "t/2"), 0.0) == []
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
        core = connected()
        watch = watched(core, before)
        core.receive(say("event", state="locked", **after), 0.0)
        assert take(watch) == [
            *([f"unlocked {before['mode']} t/1 1"] if ends else []),
            f"locked {after['mode']} t/1 2",
        ]
        core.receive(event("unlocked", "t/1", 1), 0.0)
        assert take(watch) == ([] if ends else [f"unlocked {before['mode']} t/1 1"])


class TestTwoOfOnePrefix:
    def test_have_pictures_of_their_own(self):
        core = connected()
        first = watched(core, row("t/1"))
        second = wanted(core)
        assert core.outgoing() == watch_line()
        core.receive(event("locked", "t/2", 2), 0.0)
        assert take(first) == locks("t/2 2")
        assert core.receive(watching(row("t/1"), row("t/2", 2)), 0.0) == [(second, None, None)]
        assert take(first) == []
        assert take(second) == locks("t/1 1", "t/2 2")
        core.receive(event("unlocked", "t/1"), 0.0)
        assert take(first) == take(second) == unlocks("t/1 1")

    def test_the_last_one_says_that_it_is_over(self):
        core = connected()
        first, second, other = watched(core), watched(core), watched(core, prefix="u")
        assert core.unwatch(first) == []
        assert core.outgoing() == b""
        core.unwatch(second)
        assert core.outgoing() == unwatch_line()
        core.unwatch(second)
        assert core.outgoing() == b""
        assert core.receive(say("unwatched", prefix="t/") + event("locked", "t/1"), 0.0) == []
        assert not core.broken
        assert take(second) == take(other) == []

    def test_one_that_begins_while_the_last_one_ends_is_asked_for_behind_it(self):
        core = connected()
        core.unwatch(watched(core, row("t/1")))
        watch = wanted(core)
        assert core.outgoing() == unwatch_line() + watch_line()
        assert core.receive(event("unlocked", "t/1") + say("unwatched", prefix="t/"), 0.0) == []
        assert core.receive(watching(row("t/2", 2)), 0.0) == [(watch, None, None)]
        assert take(watch) == locks("t/2 2")


class TestEnding:
    def test_wakes_whoever_waits(self):
        core = connected()
        watch = watched(core)
        core.want(watch, 0.0)
        assert core.unwatch(watch) == [(watch, None, None)]
        assert watch.ended

    def test_before_the_answer_leaves_nothing_behind(self):
        core = connected()
        watch = wanted(core)
        core.unwatch(watch)
        assert core.outgoing() == watch_line() + unwatch_line()
        assert core.receive(watching(row("t/1")) + event("locked", "t/2") + say("unwatched", prefix="t/"), 0.0) == []
        assert not watch.changes
        assert not core.broken
        assert cut(core) == []
        assert core.outgoing() == b""

    def test_of_one_that_was_never_wanted_says_nothing(self):
        core = connected()
        assert core.unwatch(Watch("t/")) == []
        assert core.outgoing() == b""

    def test_comes_with_that_of_the_client(self):
        core = connected()
        first, second = watched(core, row("t/1")), watched(core)
        core.want(second, 0.0)
        core.receive(event("unlocked", "t/1"), 0.0)
        assert core.closing(0.0) == [(second, None, None)]
        assert first.ended
        assert second.ended
        assert not first.changes

    @pytest.mark.parametrize("code", ["bad-request", "too-many", "unknown-command"])
    def test_by_a_refusal(self, code):
        core = connected()
        first, ping = watched(core), Ping()
        core.send(ping, 0.0)
        watch = wanted(core)
        assert core.receive(PONG, 0.0) == [(ping, None, None)]
        [(call, _, refusal)] = core.receive(error(code), 0.0)
        assert call is watch
        assert isinstance(refusal, RequestRejected)
        assert (watch.ended, first.ended) == (True, False)
        core.outgoing()
        core.receive(event("locked", "t/1"), 0.0)
        assert take(first) == locks("t/1 1")
        cut(core)
        core.want(first, 0.0)
        assert core.outgoing() == watch_line()

    def test_by_a_refusal_leaves_the_server_alone(self):
        core = connected(watching=True)
        wanted(core)
        core.outgoing()
        core.receive(error("too-many"), 0.0)
        core.tick(2.0)
        assert core.outgoing() == b""

    def test_by_a_refusal_that_nobody_waits_for_any_more(self):
        core = connected()
        core.unwatch(wanted(core))
        assert core.receive(error("too-many") + say("unwatched", prefix="t/"), 0.0) == []
        assert not core.broken


def test_an_answer_that_nothing_waits_for_is_ignored():
    for line in (watching(row("t/1")), say("unwatched", prefix="t/")):
        core = connected()
        assert core.receive(line, 0.0) == []
        assert not core.broken


class TestAfterAGap:
    def test_the_difference_is_told(self):
        core = connected()
        watch = watched(core, row("t/1", 1), row("t/2", 2), row("t/3", 3), row("t/4", 4))
        core.want(watch, 0.0)
        cut(core)
        assert core.outgoing() == watch_line()
        told = watching(row("t/2", 2), row("t/3", 5), row("t/4", 4), row("t/6", 6))
        assert core.receive(told, 0.0) == [(watch, None, None)]
        assert take(watch) == unlocks("t/1 1", "t/3 3") + locks("t/3 5", "t/6 6")

    def test_no_difference_is_none(self):
        core = connected()
        watch = watched(core, row("t/1"))
        core.want(watch, 0.0)
        cut(core)
        assert core.receive(watching(row("t/1")), 0.0) == []
        assert core.receive(event("unlocked", "t/1"), 0.0) == [(watch, None, None)]

    def test_what_was_not_taken_yet_is_still_told(self):
        core = connected()
        watch = watched(core)
        core.receive(event("locked", "t/1"), 0.0)
        cut(core, resumed=False)
        assert core.outgoing() == b"", "it is asked for when more is wanted"
        core.receive(event("locked", "t/9", 9), 0.0)
        assert take(watch) == locks("t/1 1")
        core.want(watch, 0.0)
        assert core.outgoing() == watch_line()
        core.receive(watching(), 0.0)
        assert take(watch) == unlocks("t/1 1")

    def test_nothing_is_said_before_there_is_a_connection(self):
        core = InOrder(SECRET)
        watch = wanted(core)
        assert core.outgoing() == b""
        greet(core, resumed=False)
        assert core.outgoing() == watch_line()
        assert cut(core) == [], "the answer is lost"
        assert core.outgoing() == watch_line()
        assert core.receive(watching(row("t/1")), 0.0) == [(watch, None, None)]

    def test_a_server_that_does_not_lead_is_left_and_the_next_is_asked(self):
        core = connected()
        wanted(core)
        core.outgoing()
        assert core.receive(error("unavailable", leader="b:1"), 0.0) == []
        assert core.broken
        assert core.elsewhere == "b:1"
        cut(core)
        assert core.outgoing() == watch_line()

    def test_that_the_server_makes_all_is_asked_for_anew(self):
        core = connected()
        watch, other = watched(core, row("t/1")), watched(core, prefix="u")
        core.want(watch, 0.0)
        assert core.receive(LAGGED, 0.0) == []
        assert core.outgoing() == watch_line(), "the other one is not wanted now"
        assert core.receive(event("locked", "u", 3) + watching(row("t/2", 2)), 0.0) == [(watch, None, None)]
        assert take(watch) == unlocks("t/1 1") + locks("t/2 2")
        core.want(other, 0.0)
        assert core.outgoing() == watch_line("u")
        core.unwatch(other)
        assert core.outgoing() == unwatch_line("u")

    def test_that_the_server_makes_is_none_for_what_it_has_not_answered(self):
        core = connected()
        watch = wanted(core)
        assert core.outgoing() == watch_line()
        core.receive(LAGGED + watching(), 0.0)
        assert core.outgoing() == b""
        core.receive(event("locked", "t/1"), 0.0)
        assert take(watch) == locks("t/1 1")

    def test_one_that_has_ended_at_the_server_is_not_ended_again(self):
        core = connected()
        watch = watched(core)
        core.receive(LAGGED, 0.0)
        core.unwatch(watch)
        assert core.outgoing() == b""

    def test_of_a_slow_taker(self, monkeypatch):
        monkeypatch.setattr(watches, "BUFFER", 3)
        core = connected()
        watch = watched(core)
        core.receive(b"".join(event("locked", f"t/{id_}", id_) for id_ in range(1, 6)), 0.0)
        assert core.outgoing() == b""
        assert take(watch) == locks("t/1 1", "t/2 2", "t/3 3")
        core.receive(event("unlocked", "t/1"), 0.0)
        assert take(watch) == []
        core.want(watch, 0.0)
        assert core.outgoing() == watch_line()
        core.receive(watching(*(row(f"t/{id_}", id_) for id_ in (2, 3, 5, 6, 7, 8))), 0.0)
        assert take(watch) == unlocks("t/1 1") + locks("t/5 5", "t/6 6", "t/7 7", "t/8 8")
        core.unwatch(watch)
        assert core.outgoing() == unwatch_line()


class TestTruncated:
    def test_is_said(self):
        core = connected()
        assert watched(core, row("t/1"), truncated=True).truncated
        assert not watched(core, row("t/1")).truncated

    def test_does_not_end_what_it_does_not_tell(self):
        core = connected()
        watch = watched(core, row("t/1", 1), row("t/2", 2), row("t/3", 3))
        core.want(watch, 0.0)
        cut(core)
        core.receive(watching(row("t/2", 8), row("t/4", 4), truncated=True), 0.0)
        assert watch.truncated
        assert take(watch) == unlocks("t/2 2") + locks("t/2 8", "t/4 4")
        core.receive(event("unlocked", "t/1") + event("locked", "t/3", 9), 0.0)
        assert take(watch) == unlocks("t/1 1", "t/3 3") + locks("t/3 9")

    def test_is_over_with_the_next_answer_that_is_whole(self):
        core = connected()
        watch = watched(core, row("t/1", 1), row("t/2", 2), truncated=True)
        core.want(watch, 0.0)
        cut(core)
        core.receive(watching(row("t/1", 1)), 0.0)
        assert not watch.truncated
        assert take(watch) == unlocks("t/2 2")


class TestSilence:
    def test_is_noticed_while_something_is_watched(self):
        core = connected(watching=True)
        watch = watched(core)
        assert core.tick(2.0) == []
        assert core.outgoing() == PING
        core.receive(PONG, 2.0)
        for now in (4.0, 5.0, 6.0, 7.0):
            core.tick(now)
        assert core.broken
        core.disconnected("silent", 0.0)
        core.unwatch(watch)
        greet(core, now=8.0)
        core.tick(10.0)
        assert core.outgoing() == b""

    def test_is_noticed_behind_a_reconnect_too(self):
        core = connected(watching=True)
        watched(core)
        cut(core, now=1.0)
        core.tick(3.0)
        assert core.outgoing() == PING


def test_locks_of_ones_own_are_none_of_its_business():
    core = connected()
    request = held(core)
    watch = watched(core, row("a", 101), prefix="a")
    release = core.leave(request, 0.0)
    release.waiter = Future()
    core.receive(event("unlocked", "a", 101), 0.0)
    assert core.receive(released(101, "success", release.ref), 0.0) == [(release, "success", None)]
    assert take(watch) == unlocks("a 101")


@pytest.mark.parametrize("prefix", ["x" * 513, "a\nb", "\ud800"])
def test_a_prefix_that_the_server_would_refuse(prefix):
    with pytest.raises(ValueError, match=r"prefix|surrogate"):
        Watch(prefix)
