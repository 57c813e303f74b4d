"""Sessions: bound requests, retained replies and expiry."""

from __future__ import annotations

import pytest

from genie.core import Context, Request
from genie.server import sessions as sessions_module
from genie.server.peer import Peer
from genie.server.sessions import (
    PRESUMED_RECEIVED_MS,
    Session,
    SessionTable,
    fingerprint,
    is_same_request,
    session_key,
)
from genie.storage.store import RetainedReply, StoredOrigin


def request_for(ref: str | None = "r", **options: object) -> Request:
    request = Request(exclusive=("A",), ref=ref, **options)  # type: ignore[arg-type]
    request.id = id(request)
    return request


def test_a_retained_reply_replaces_its_request_and_the_oldest_is_dropped_first() -> None:
    session = Session(None)
    requests = [request_for(f"{number}") for number in range(4)]
    for request in requests:
        session.add_granted(request)
    assert session.find("0") is requests[0]
    terminal_replies = [terminal_reply(request.id, 0, request.ref) for request in requests]
    for reply in terminal_replies:
        session.retain(reply)
    assert session.find("0") is terminal_replies[0]
    assert session.drop_oldest_reply() is terminal_replies[0]
    assert [session.find(f"{number}") for number in range(4)] == [None, *terminal_replies[1:]]


def test_a_reused_ref_still_finds_the_second_request_after_the_first_reply_is_dropped() -> None:
    session = Session(None)
    session.retain(terminal_reply(1, 0, "again"))
    second = request_for("again")
    session.add_granted(second)
    session.drop_oldest_reply()
    assert session.find("again") is second


def test_granted_requests_are_bound_only_if_they_end_with_the_session() -> None:
    session = Session(None)  # type: ignore[arg-type]
    outliving, bound = request_for(None), request_for(None, release_on_disconnect=True)
    for request in (outliving, bound):
        session.add_queued(request)
    assert set(session.bound.values()) == {outliving, bound}
    for request in (outliving, bound):
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
        {"context": Context(note="another")},
        {"context": Context(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")},
    ],
)
def test_a_retry_must_have_the_same_parameters(other: dict[str, object]) -> None:
    assert is_same_request(request_for(), request_for())
    assert not is_same_request(request_for(), request_for(**other))


def test_a_retry_of_a_request_that_was_loaded_from_the_store_is_the_same_request() -> None:
    """Its numbers may have other types than those that a client sent."""
    sent = request_for(priority=0.0, queue_timeout_ms=10_000.0, transaction_timeout_ms=20_000)
    loaded = request_for(priority=0, queue_timeout_ms=10_000, transaction_timeout_ms=20_000.0)
    assert is_same_request(sent, loaded)
    assert fingerprint(sent) == fingerprint(loaded)
    assert fingerprint(sent) != fingerprint(request_for(priority=1, queue_timeout_ms=10_000.0))


def test_the_order_of_resources_does_not_distinguish_requests() -> None:
    first, second = Request(exclusive=("A", "B"), shared=("C", "D")), Request(exclusive=("B", "A"), shared=("D", "C"))
    assert is_same_request(first, second)
    assert not is_same_request(first, Request(exclusive=("A", "C"), shared=("B", "D")))


SECRET = "a secret of sixteen"  # noqa: S105 - not a real secret


def terminal_reply(id_: int, at: float, ref: str | None = None) -> RetainedReply:
    return RetainedReply(id_, ref, StoredOrigin(session_key(SECRET), 1000.0), at, b"{}\n")


def test_retained_replies_are_sent_again_unless_they_were_presumably_received() -> None:
    session = Session(Peer(), "key")  # type: ignore[arg-type]
    session.connected_at = 500.0
    session.retain(terminal_reply(1, 0.0, "r"))
    session.retain(terminal_reply(2, 2000.0))
    session.retain(RetainedReply(3, "own", session, 2000.0, b""))
    session.on_disconnect(400 + PRESUMED_RECEIVED_MS)
    assert [reply.id for reply in session.unreceived_replies()] == [1, 2], (
        "its connection was open for too short a time"
    )
    session.on_disconnect(600 + PRESUMED_RECEIVED_MS)
    assert [reply.id for reply in session.unreceived_replies()] == [2]
    session.on_disconnect(2000 + PRESUMED_RECEIVED_MS)
    assert list(session.unreceived_replies()) == []
    assert session.find("r") is not None, "the ref is still known"
    assert session.find("own") is not None


def test_a_session_retains_a_limited_number_of_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_RETAINED_REPLIES", 3)
    sessions = SessionTable()
    session, _ = sessions.attach(SECRET, 1000)
    assert [sessions.retain(session, terminal_reply(id_, id_, f"{id_}")) for id_ in range(5)] == [[], [], [], [0], [1]]
    assert [session.find(f"{id_}") is not None for id_ in range(5)] == [False, False, True, True, True]


def test_beyond_the_limit_of_all_sessions_the_oldest_reply_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_RETAINED_REPLIES_TOTAL", 3)
    sessions = SessionTable()
    first, _ = sessions.attach(SECRET, 1000)
    second, _ = sessions.attach(SECRET + "2", 1000)
    for id_ in range(3):
        assert sessions.retain(first, terminal_reply(id_, id_, f"{id_}")) == []
    assert sessions.retain(second, terminal_reply(3, 3, "3")) == [0]
    assert second.find("3") is not None
    assert first.find("0") is None
    assert sessions.drop_oldest_replies(first, 9) == [1, 2]
    sessions.remove(first)
    assert sessions.retain(second, terminal_reply(4, 4, "4")) == []


def test_a_detached_session_is_kept_only_if_there_is_something_to_resume() -> None:
    sessions = SessionTable()
    session, resumed = sessions.attach(SECRET, 1000)
    assert not resumed
    sessions.detach(session, 0)
    session, resumed = sessions.attach(SECRET, 1000)
    assert not resumed, "there was nothing to resume"
    sessions.retain(session, terminal_reply(1, 0))
    sessions.detach(session, 10.5)
    resumed_session, resumed = sessions.attach(SECRET, 500)
    assert resumed
    assert resumed_session is session
    assert not sessions.expired(1e9, 1), "it is connected"
    sessions.detach(session, 10.5)
    assert sessions.expired(510, 1) == []
    assert sessions.expired(511, 1) == [session]
    assert sessions.drop_oldest_replies(session, 9) == [1]
    sessions.remove(session)
    assert list(sessions) == []


def test_loaded_requests_and_replies_are_restored_to_their_sessions() -> None:
    sessions = SessionTable()
    origin = StoredOrigin(session_key(SECRET), 1000.0)
    own, without_session = request_for(origin=origin), request_for(origin=Session(None))
    sessions.restore([own, without_session], [terminal_reply(7, 0, "e")])
    for session in [*sessions]:
        sessions.detach(session, 100)
    session, resumed = sessions.attach(SECRET, 1000)
    assert resumed
    assert own.origin is session
    assert without_session.origin is None
    assert list(session.bound.values()) == [own]
    assert session.find("r") is own
    assert session.retained_replies is not None
    assert session.find("e") is session.retained_replies[0]


@pytest.mark.parametrize("now", [100.0, 61_500.0, 1e9])
def test_loaded_replies_count_as_not_received(now: float) -> None:
    sessions = SessionTable()
    loaded = RetainedReply(7, "e", StoredOrigin(session_key(SECRET), 1000.0), 0.0, b"line")
    sessions.restore([], [loaded])
    for session in [*sessions]:
        sessions.detach(session, now)
    session, _ = sessions.attach(SECRET, 1000)
    assert list(session.unreceived_replies()) == [loaded]
