from __future__ import annotations

import pytest

from genie.core import Request
from genie.server import sessions as module
from genie.server.sessions import PRESUMED_RECEIVED_MS, Session, SessionTable, is_same_request, session_key
from genie.storage.store import RetainedReply, StoredOrigin


def ask(ref: str | None = "r", **options: object) -> Request:
    request = Request(exclusive=("A",), ref=ref, **options)  # type: ignore[arg-type]
    request.id = id(request)
    return request


def test_an_ending_takes_the_place_of_its_request_and_goes_first_in_first_out() -> None:
    session = Session(None)
    requests = [ask(f"{number}") for number in range(4)]
    for request in requests:
        session.add_granted(request)
    assert session.find("0") is requests[0]
    endings = [ending(request.id, 0, request.ref) for request in requests]
    for one in endings:
        session.retain(one)
    assert session.find("0") is endings[0]
    assert session.drop_oldest_reply() is endings[0]
    assert [session.find(f"{number}") for number in range(4)] == [None, *endings[1:]]


def test_a_ref_in_use_again_is_not_forgotten_with_its_first_request() -> None:
    session = Session(None)
    session.retain(ending(1, 0, "again"))
    second = ask("again")
    session.add_granted(second)
    session.drop_oldest_reply()
    assert session.find("again") is second


def test_only_what_ends_with_the_session_is_bound() -> None:
    session = Session(None)  # type: ignore[arg-type]
    kept, bound = ask(None), ask(None, release_on_disconnect=True)
    for request in (kept, bound):
        session.add_queued(request)
    assert set(session.bound.values()) == {kept, bound}
    for request in (kept, bound):
        session.on_granted(request)
    assert set(session.bound.values()) == {bound}


@pytest.mark.parametrize(
    "other",
    [
        {"priority": 1},
        {"queue_timeout_ms": 1},
        {"transaction_timeout_ms": 1},
        {"transaction": "T"},
        {"release_on_disconnect": True},
        {"shared": ("B",)},
        {"note": "another"},
    ],
)
def test_a_repetition_must_ask_for_the_same(other: dict[str, object]) -> None:
    assert is_same_request(ask(), ask())
    assert not is_same_request(ask(), ask(**other))


def test_the_order_of_resources_has_no_meaning() -> None:
    one, other = Request(exclusive=("A", "B"), shared=("C", "D")), Request(exclusive=("B", "A"), shared=("D", "C"))
    assert is_same_request(one, other)
    assert not is_same_request(one, Request(exclusive=("A", "C"), shared=("B", "D")))


SECRET = "a secret of sixteen"  # noqa: S105 - it guards nothing


def ending(id_: int, at: float, ref: str | None = None) -> RetainedReply:
    return RetainedReply(id_, ref, StoredOrigin(session_key(SECRET), 1000.0), at, b"{}\n")


def test_endings_are_sent_again_unless_they_were_received_or_asked_for_by_the_session() -> None:
    session = Session(object(), "key")  # type: ignore[arg-type]
    session.connected_at = 500.0
    session.retain(ending(1, 0.0, "r"))
    session.retain(ending(2, 2000.0))
    session.retain(RetainedReply(3, "own", session, 2000.0, b""))
    session.on_disconnect(400 + PRESUMED_RECEIVED_MS)
    assert [one.id for one in session.unreceived_replies()] == [1, 2], "its connection had not stood for long"
    session.on_disconnect(600 + PRESUMED_RECEIVED_MS)
    assert [one.id for one in session.unreceived_replies()] == [2]
    session.on_disconnect(2000 + PRESUMED_RECEIVED_MS)
    assert list(session.unreceived_replies()) == []
    assert session.find("r") is not None, "a ref is remembered all the same"
    assert session.find("own") is not None


def test_a_session_remembers_its_last_endings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RETAINED_REPLIES", 3)
    sessions = SessionTable()
    session, _ = sessions.attach(SECRET, 1000)
    assert [sessions.retain(session, ending(id_, id_, f"{id_}")) for id_ in range(5)] == [[], [], [], [0], [1]]
    assert [session.find(f"{id_}") is not None for id_ in range(5)] == [False, False, True, True, True]


def test_beyond_the_bound_of_all_sessions_the_oldest_ending_of_all_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_RETAINED_REPLIES_TOTAL", 3)
    sessions = SessionTable()
    first, _ = sessions.attach(SECRET, 1000)
    second, _ = sessions.attach(SECRET + "2", 1000)
    for id_ in range(3):
        assert sessions.retain(first, ending(id_, id_, f"{id_}")) == []
    assert sessions.retain(second, ending(3, 3, "3")) == [0]
    assert second.find("3") is not None
    assert first.find("0") is None
    assert sessions.remove(first) == [1, 2]
    assert sessions.retain(second, ending(4, 4, "4")) == []


def test_a_session_waits_for_its_next_connection_only_if_there_is_something_to_say() -> None:
    sessions = SessionTable()
    session, resumed = sessions.attach(SECRET, 1000)
    assert not resumed
    sessions.detach(session, 0)
    session, resumed = sessions.attach(SECRET, 1000)
    assert not resumed, "it had nothing"
    sessions.retain(session, ending(1, 0))
    sessions.detach(session, 10.5)
    again, resumed = sessions.attach(SECRET, 500)
    assert resumed
    assert again is session
    assert sessions.next_expired(1e9) is None, "it is connected"
    sessions.detach(session, 10.5)
    assert sessions.next_expired(510) is None
    assert sessions.next_expired(511) is session
    assert sessions.remove(session) == [1]
    assert list(sessions) == []


def test_what_was_loaded_belongs_to_its_sessions_again() -> None:
    sessions = SessionTable()
    origin = StoredOrigin(session_key(SECRET), 1000.0)
    mine, nobody_s = ask(origin=origin), ask(origin=Session(None))
    sessions.restore([mine, nobody_s], [ending(7, 0, "e")], 100)
    session, resumed = sessions.attach(SECRET, 1000)
    assert resumed
    assert mine.origin is session
    assert nobody_s.origin is None
    assert list(session.bound.values()) == [mine]
    assert session.find("r") is mine
    assert session.retained_replies is not None
    assert session.find("e") is session.retained_replies[0]


@pytest.mark.parametrize("now", [100.0, 61_500.0, 1e9])
def test_endings_that_were_loaded_count_as_not_received(now: float) -> None:
    sessions = SessionTable()
    loaded = RetainedReply(7, "e", StoredOrigin(session_key(SECRET), 1000.0), 0.0, b"line")
    sessions.restore([], [loaded], now)
    session, _ = sessions.attach(SECRET, 1000)
    assert list(session.unreceived_replies()) == [loaded]
