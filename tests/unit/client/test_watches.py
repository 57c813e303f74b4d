"""Watches by literal messages: changes, resynchronization, and what is sent to the server."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie import Change
from genie.client import watches
from genie.client.commands import Ping
from genie.client.session import ClientSession
from genie.client.watches import Watch
from genie.errors import RequestRejected
from genie.protocol.messages import HeldRow
from support.network.scripted_server import (
    SECRET,
    RefIgnoringSession,
    complete_handshake,
    encode,
    error,
    granted_request,
    reconnect,
    released,
)
from support.network.scripted_server import connected_session as connected_session_of

PING = encode("ping")
PONG = encode("pong")


def connected(*, keepalive: bool = False) -> ClientSession:
    return connected_session_of(RefIgnoringSession, keepalive=keepalive)


def row(resource: str, id: int = 1, transaction: str | None = None, mode: str = "exclusive") -> dict[str, object]:
    name = {} if transaction is None else {"transactionName": transaction}
    return {"resource": resource, "mode": mode, "id": id, **name}


def watching(*rows: dict[str, object], prefix: str = "t/", truncated: bool = False) -> bytes:
    return encode("watching", prefix=prefix, held=rows, truncated=truncated)


def event(state: str, resource: str, id: int = 1, transaction: str | None = None, mode: str = "exclusive") -> bytes:
    return encode("event", state=state, **row(resource, id, transaction, mode))


def watch_line(prefix: str = "t/") -> bytes:
    return encode("watch", prefix=prefix)


def unwatch_line(prefix: str = "t/") -> bytes:
    return encode("unwatch", prefix=prefix)


LAGGED = encode("event", state="lagged")


def awaited_watch(session: ClientSession, prefix: str = "t/") -> Watch:
    watch = Watch(prefix)
    session.watches.request_next(watch, 0.0)
    return watch


def live_watch(session: ClientSession, *rows: dict[str, object], prefix: str = "t/", truncated: bool = False) -> Watch:
    """A watch that the server has answered, with all that it told taken; nobody waits for more of it just now."""
    watch = awaited_watch(session, prefix)
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


class TestChanges:
    def test_start_with_the_snapshot_and_continue_with_events(self):
        session = connected()
        watch = awaited_watch(session)
        assert session.data_to_send() == watch_line()
        told = watching(row("t/1", 5, "tx"), row("t/2", 6, mode="shared"), row("t/2", 7, mode="shared"))
        assert session.receive_data(told, 0.0) == [(watch, None, None)]
        assert list(watch.changes) == [
            Change("t/1", "locked", "exclusive", 5, "tx"),
            Change("t/2", "locked", "shared", 6),
            Change("t/2", "locked", "shared", 7),
        ]
        watch.changes.clear()
        session.watches.request_next(watch, 0.0)
        assert session.data_to_send() == b"", "it is told already"
        told = event("unlocked", "t/1", 5) + event("locked", "t/1", 8, "ty") + event("locked", "t/2", 9)
        assert session.receive_data(told, 0.0) == [(watch, None, None)], "whoever waits is told once"
        assert list(watch.changes)[:2] == [
            Change("t/1", "unlocked", "exclusive", 5, "tx"),
            Change("t/1", "locked", "exclusive", 8, "ty"),
        ]

    def test_an_empty_snapshot_has_no_changes(self):
        session = connected()
        watch = awaited_watch(session)
        assert session.receive_data(watching(), 0.0) == []
        assert session.receive_data(event("locked", "t/1"), 0.0) == [(watch, None, None)]
        assert take(watch) == locks("t/1 1")

    def test_only_matching_prefixes_are_reported(self):
        session = connected()
        watch, wide, all_ = live_watch(session), live_watch(session, prefix="t"), live_watch(session, prefix="")
        session.receive_data(event("locked", "t/1") + event("locked", "t2", 2) + event("locked", "u", 3), 0.0)
        assert take(watch) == locks("t/1 1")
        assert take(wide) == locks("t/1 1", "t2 2")
        assert take(all_) == locks("t/1 1", "t2 2", "u 3")

    def test_a_known_lock_is_not_reported_again(self):
        session = connected()
        watch = live_watch(session, row("t/1"))
        session.receive_data(event("locked", "t/1") + event("unlocked", "t/2", 9) + event("unlocked", "t/1") * 2, 0.0)
        assert take(watch) == unlocks("t/1 1")

    def test_unknown_states_of_a_newer_server_are_ignored(self):
        session = connected()
        watch = live_watch(session, row("t/1"))
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
    def test_conflicting_locks_are_never_reported_together(self, before, after, ends):
        session = connected()
        watch = live_watch(session, before)
        session.receive_data(encode("event", state="locked", **after), 0.0)
        assert take(watch) == [*([f"unlocked {before['mode']} t/1 1"] if ends else []), f"locked {after['mode']} t/1 2"]
        session.receive_data(event("unlocked", "t/1", 1), 0.0)
        assert take(watch) == ([] if ends else [f"unlocked {before['mode']} t/1 1"])


class TestTwoWatchesOfOnePrefix:
    def test_have_separate_states(self):
        session = connected()
        first = live_watch(session, row("t/1"))
        second = awaited_watch(session)
        assert session.data_to_send() == watch_line()
        session.receive_data(event("locked", "t/2", 2), 0.0)
        assert take(first) == locks("t/2 2")
        assert session.receive_data(watching(row("t/1"), row("t/2", 2)), 0.0) == [(second, None, None)]
        assert take(first) == []
        assert take(second) == locks("t/1 1", "t/2 2")
        session.receive_data(event("unlocked", "t/1"), 0.0)
        assert take(first) == take(second) == unlocks("t/1 1")

    def test_the_last_one_sends_unwatch(self):
        session = connected()
        first, second, other = live_watch(session), live_watch(session), live_watch(session, prefix="u")
        assert session.unwatch(first, 0.0) == []
        assert session.data_to_send() == b""
        session.unwatch(second, 0.0)
        assert session.data_to_send() == unwatch_line()
        session.unwatch(second, 0.0)
        assert session.data_to_send() == b""
        assert session.receive_data(encode("unwatched", prefix="t/") + event("locked", "t/1"), 0.0) == []
        assert not session.handshake.close_reason
        assert take(second) == take(other) == []

    def test_one_that_starts_while_the_last_one_ends_is_sent_after_unwatch(self):
        session = connected()
        session.unwatch(live_watch(session, row("t/1")), 0.0)
        watch = awaited_watch(session)
        assert session.data_to_send() == unwatch_line() + watch_line()
        assert session.receive_data(event("unlocked", "t/1") + encode("unwatched", prefix="t/"), 0.0) == []
        assert session.receive_data(watching(row("t/2", 2)), 0.0) == [(watch, None, None)]
        assert take(watch) == locks("t/2 2")


class TestEnd:
    def test_wakes_a_waiting_consumer(self):
        session = connected()
        watch = live_watch(session)
        session.watches.request_next(watch, 0.0)
        assert session.unwatch(watch, 0.0) == [(watch, None, None)]
        assert watch.ended

    def test_before_the_reply_leaves_no_subscription(self):
        session = connected()
        watch = awaited_watch(session)
        session.unwatch(watch, 0.0)
        assert session.data_to_send() == watch_line() + unwatch_line()
        assert (
            session.receive_data(watching(row("t/1")) + event("locked", "t/2") + encode("unwatched", prefix="t/"), 0.0)
            == []
        )
        assert not watch.changes
        assert not session.handshake.close_reason
        assert reconnect(session) == []
        assert session.data_to_send() == b""

    def test_of_a_watch_that_was_never_sent_sends_nothing(self):
        session = connected()
        assert session.unwatch(Watch("t/"), 0.0) == []
        assert session.data_to_send() == b""

    def test_all_watches_end_with_the_client(self):
        session = connected()
        first, second = live_watch(session, row("t/1")), live_watch(session)
        session.watches.request_next(second, 0.0)
        session.receive_data(event("unlocked", "t/1"), 0.0)
        assert session.begin_close(0.0) == [(second, None, None)]
        assert first.ended
        assert second.ended
        assert not first.changes

    @pytest.mark.parametrize("code", ["bad-request", "too-many", "unknown-command"])
    def test_by_a_rejection(self, code):
        session = connected()
        first, ping = live_watch(session), Ping()
        session.send(ping, 0.0)
        watch = awaited_watch(session)
        assert session.receive_data(PONG, 0.0) == [(ping, None, None)]
        [(call, _, refusal)] = session.receive_data(error(code), 0.0)
        assert call is watch
        assert isinstance(refusal, RequestRejected)
        assert (watch.ended, first.ended) == (True, False)
        session.data_to_send()
        session.receive_data(event("locked", "t/1"), 0.0)
        assert take(first) == locks("t/1 1")
        reconnect(session)
        session.watches.request_next(first, 0.0)
        assert session.data_to_send() == watch_line()

    def test_by_a_rejection_sends_nothing_more(self):
        session = connected(keepalive=True)
        awaited_watch(session)
        session.data_to_send()
        session.receive_data(error("too-many"), 0.0)
        session.on_timer(2.0)
        assert session.data_to_send() == b""

    def test_a_rejection_without_a_waiting_consumer_is_kept(self):
        session = connected()
        session.unwatch(awaited_watch(session), 0.0)
        assert session.receive_data(error("too-many") + encode("unwatched", prefix="t/"), 0.0) == []
        assert not session.handshake.close_reason


def test_an_unexpected_reply_is_ignored():
    for line in (watching(row("t/1")), encode("unwatched", prefix="t/")):
        session = connected()
        assert session.receive_data(line, 0.0) == []
        assert not session.handshake.close_reason


class TestResync:
    def test_reports_the_difference(self):
        session = connected()
        watch = live_watch(session, row("t/1", 1), row("t/2", 2), row("t/3", 3), row("t/4", 4))
        session.watches.request_next(watch, 0.0)
        reconnect(session)
        assert session.data_to_send() == watch_line()
        told = watching(row("t/2", 2), row("t/3", 5), row("t/4", 4), row("t/6", 6))
        assert session.receive_data(told, 0.0) == [(watch, None, None)]
        assert take(watch) == unlocks("t/1 1", "t/3 3") + locks("t/3 5", "t/6 6")

    def test_without_a_difference_reports_nothing(self):
        session = connected()
        watch = live_watch(session, row("t/1"))
        session.watches.request_next(watch, 0.0)
        reconnect(session)
        assert session.receive_data(watching(row("t/1")), 0.0) == []
        assert session.receive_data(event("unlocked", "t/1"), 0.0) == [(watch, None, None)]

    def test_unconsumed_changes_are_delivered_first(self):
        session = connected()
        watch = live_watch(session)
        session.receive_data(event("locked", "t/1"), 0.0)
        reconnect(session, resumed=False)
        assert session.data_to_send() == b"", "it is asked for when more is wanted"
        session.receive_data(event("locked", "t/9", 9), 0.0)
        assert take(watch) == locks("t/1 1")
        session.watches.request_next(watch, 0.0)
        assert session.data_to_send() == watch_line()
        session.receive_data(watching(), 0.0)
        assert take(watch) == unlocks("t/1 1")

    def test_nothing_is_sent_while_disconnected(self):
        session = RefIgnoringSession(SECRET)
        watch = awaited_watch(session)
        assert session.data_to_send() == b""
        complete_handshake(session, resumed=False)
        assert session.data_to_send() == watch_line()
        assert reconnect(session) == [], "the answer is lost"
        assert session.data_to_send() == watch_line()
        assert session.receive_data(watching(row("t/1")), 0.0) == [(watch, None, None)]

    def test_after_a_redirect_the_next_server_gets_the_watch(self):
        session = connected()
        awaited_watch(session)
        session.data_to_send()
        assert session.receive_data(error("unavailable", leader="b:1"), 0.0) == []
        assert session.handshake.close_reason
        assert session.handshake.redirect == "b:1"
        reconnect(session)
        assert session.data_to_send() == watch_line()

    def test_after_lagged_all_watches_are_sent_again(self):
        session = connected()
        watch, other = live_watch(session, row("t/1")), live_watch(session, prefix="u")
        session.watches.request_next(watch, 0.0)
        assert session.receive_data(LAGGED, 0.0) == []
        assert session.data_to_send() == watch_line(), "the other one is not wanted now"
        assert session.receive_data(event("locked", "u", 3) + watching(row("t/2", 2)), 0.0) == [(watch, None, None)]
        assert take(watch) == unlocks("t/1 1") + locks("t/2 2")
        session.watches.request_next(other, 0.0)
        assert session.data_to_send() == watch_line("u")
        session.unwatch(other, 0.0)
        assert session.data_to_send() == unwatch_line("u")

    def test_lagged_does_not_affect_unanswered_watches(self):
        session = connected()
        watch = awaited_watch(session)
        assert session.data_to_send() == watch_line()
        session.receive_data(LAGGED + watching(), 0.0)
        assert session.data_to_send() == b""
        session.receive_data(event("locked", "t/1"), 0.0)
        assert take(watch) == locks("t/1 1")

    def test_after_lagged_no_unwatch_is_sent(self):
        session = connected()
        watch = live_watch(session)
        session.receive_data(LAGGED, 0.0)
        session.unwatch(watch, 0.0)
        assert session.data_to_send() == b""

    def test_of_a_slow_consumer(self, monkeypatch):
        monkeypatch.setattr(watches, "MAX_BUFFERED_CHANGES", 3)
        session = connected()
        watch = live_watch(session)
        session.receive_data(b"".join(event("locked", f"t/{id_}", id_) for id_ in range(1, 6)), 0.0)
        assert session.data_to_send() == b""
        assert take(watch) == locks("t/1 1", "t/2 2", "t/3 3")
        session.receive_data(event("unlocked", "t/1"), 0.0)
        assert take(watch) == []
        session.watches.request_next(watch, 0.0)
        assert session.data_to_send() == watch_line()
        session.receive_data(watching(*(row(f"t/{id_}", id_) for id_ in (2, 3, 5, 6, 7, 8))), 0.0)
        assert take(watch) == unlocks("t/1 1") + locks("t/5 5", "t/6 6", "t/7 7", "t/8 8")
        session.unwatch(watch, 0.0)
        assert session.data_to_send() == unwatch_line()


class TestTruncated:
    def test_is_reported(self):
        session = connected()
        assert live_watch(session, row("t/1"), truncated=True).truncated
        assert not live_watch(session, row("t/1")).truncated

    def test_does_not_end_missing_locks(self):
        session = connected()
        watch = live_watch(session, row("t/1", 1), row("t/2", 2), row("t/3", 3))
        session.watches.request_next(watch, 0.0)
        reconnect(session)
        session.receive_data(watching(row("t/2", 8), row("t/4", 4), truncated=True), 0.0)
        assert watch.truncated
        assert take(watch) == unlocks("t/2 2") + locks("t/2 8", "t/4 4")
        session.receive_data(event("unlocked", "t/1") + event("locked", "t/3", 9), 0.0)
        assert take(watch) == unlocks("t/1 1", "t/3 3") + locks("t/3 9")

    def test_ends_the_oldest_of_too_many_missing_locks(self, monkeypatch):
        monkeypatch.setattr(watches, "MAX_UNLISTED_LOCKS", 2)
        session = connected()
        watch = live_watch(session, *(row(f"t/{id}", id) for id in (1, 2, 3, 4)))
        session.watches.request_next(watch, 0.0)
        reconnect(session)
        session.receive_data(watching(row("t/2", 2), row("t/5", 5), truncated=True), 0.0)
        assert take(watch) == unlocks("t/1 1") + locks("t/5 5")
        session.receive_data(event("unlocked", "t/1") + event("unlocked", "t/3", 3), 0.0)
        assert take(watch) == unlocks("t/3 3")

    def test_is_reset_by_the_next_complete_snapshot(self):
        session = connected()
        watch = live_watch(session, row("t/1", 1), row("t/2", 2), truncated=True)
        session.watches.request_next(watch, 0.0)
        reconnect(session)
        session.receive_data(watching(row("t/1", 1)), 0.0)
        assert not watch.truncated
        assert take(watch) == unlocks("t/2 2")


class TestKeepalive:
    def test_pings_while_a_watch_is_open(self):
        session = connected(keepalive=True)
        watch = live_watch(session)
        assert session.on_timer(2.0) == []
        assert session.data_to_send() == PING
        session.receive_data(PONG, 2.0)
        for now in (4.0, 5.0, 6.0, 7.0):
            session.on_timer(now)
        assert session.handshake.close_reason
        session.on_disconnected("silent")
        session.unwatch(watch, 0.0)
        complete_handshake(session, now=8.0)
        session.on_timer(10.0)
        assert session.data_to_send() == b""

    def test_pings_after_a_reconnect(self):
        session = connected(keepalive=True)
        live_watch(session)
        reconnect(session, now=1.0)
        session.on_timer(3.0)
        assert session.data_to_send() == PING


def test_messages_about_own_locks_do_not_affect_watches():
    session = connected()
    request = granted_request(session)
    watch = live_watch(session, row("a", 101), prefix="a")
    release = session.requests.release(request, 0.0)
    release.future = Future()
    session.receive_data(event("unlocked", "a", 101), 0.0)
    assert session.receive_data(released(101, "success", release.ref), 0.0) == [(release, "success", None)]
    assert take(watch) == unlocks("a 101")


@pytest.mark.parametrize("prefix", ["x" * 513, "a\nb", "\ud800"])
def test_a_prefix_that_the_server_would_reject(prefix):
    with pytest.raises(ValueError, match=r"prefix|surrogate"):
        Watch(prefix)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["locked", "locked", "unlocked"]),
            st.integers(1, 8),
            st.sampled_from(["shared", "exclusive", "units"]),
            st.sampled_from([None, "t", "u"]),
        ),
        max_size=40,
    )
)
def test_a_lock_ends_the_reported_locks_that_conflict_with_it(steps: list[tuple[str, int, str, str | None]]) -> None:
    watch, expected = Watch("a"), dict[int, Change]()
    for state, id, mode, transaction in steps:
        if state == "unlocked":
            watch.apply_unlocked("a", id)
            expected.pop(id, None)
        elif id not in expected:
            watch.apply_locked(HeldRow("a", mode, id, transaction))
            change = Change("a", "locked", mode, id, transaction)
            expected = {id: other for id, other in expected.items() if not change.conflicts_with(other)} | {id: change}
        assert watch.held_locks.get("a", {}) == expected


def test_a_shared_lock_is_not_compared_with_each_other_shared_lock_on_its_resource(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0
    conflicts_with = Change.conflicts_with

    def count(one: Change, other: Change) -> bool:
        nonlocal compared
        compared += 1
        return conflicts_with(one, other)

    monkeypatch.setattr(Change, "conflicts_with", count)
    watch = Watch("a")
    own = [HeldRow("a", "shared", id, "t") for id in range(1, 1_000)] + [HeldRow("a", "exclusive", 1_000, "t")]
    watch.apply_snapshot(own, truncated=False)
    watch.apply_unlocked("a", 1_000)
    for id in range(1_001, 2_000):
        watch.apply_locked(HeldRow("a", "shared", id))
    assert len(watch.held_locks["a"]) == 1_998
    assert compared <= 1_000, "only the first lock after those of one transaction"
