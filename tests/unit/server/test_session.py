from __future__ import annotations

import pytest

from genie.core import Request
from genie.server import session as module
from genie.server.session import ENDINGS, TOLD_MS, Session, same
from genie.server.sessions import Sessions, key_of
from genie.storage.base import Ending, StoredOrigin


def ask(ref: str | None = "r", **options: object) -> Request:
    request = Request(exclusive=("A",), ref=ref, **options)  # type: ignore[arg-type]
    request.id = id(request)
    return request


def test_a_ref_is_forgotten_some_time_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDED_REFS", 3)
    session = Session(None)  # type: ignore[arg-type]
    requests = [ask(f"{number}") for number in range(10)]
    for request in requests:
        session.granted(request)
        session.released(request)
    assert [session.known(f"{number}") for number in range(10)] == [None] * 7 + requests[7:]


def test_a_ref_in_use_again_is_not_forgotten_with_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDED_REFS", 1)
    session = Session(None)  # type: ignore[arg-type]
    first, second = ask("again"), ask("again")
    session.granted(first)
    session.released(first)
    session.granted(second)
    for number in range(3):
        other = ask(f"{number}")
        session.granted(other)
        session.released(other)
    assert session.known("again") is second


def test_only_what_ends_with_the_session_is_bound() -> None:
    session = Session(None)  # type: ignore[arg-type]
    kept, bound = ask(None), ask(None, release_on_disconnect=True)
    for request in (kept, bound):
        session.queued(request)
    assert set(session.bound.values()) == {kept, bound}
    for request in (kept, bound):
        session.locked(request)
    assert set(session.bound.values()) == {bound}
    session.released(bound)
    assert not session.bound


@pytest.mark.parametrize(
    "other",
    [
        {"priority": 1},
        {"queue_timeout_ms": 1},
        {"transaction_timeout_ms": 1},
        {"transaction": "T"},
        {"release_on_disconnect": True},
        {"shared": ("B",)},
    ],
)
def test_a_repetition_must_ask_for_the_same(other: dict[str, object]) -> None:
    assert same(ask(), ask())
    assert not same(ask(), ask(**other))


SECRET = "a secret of sixteen"  # noqa: S105 - it guards nothing


def ending(id_: int, at: float, ref: str | None = None) -> Ending:
    return Ending(id_, ref, StoredOrigin(key_of(SECRET), 1000.0), at, b"{}\n")


def test_an_ending_is_kept_until_it_must_have_been_received() -> None:
    session = Session(object(), "key")  # type: ignore[arg-type]
    session.since = 500.0
    session.keep(ending(1, 0.0, "r"))
    session.keep(ending(2, 2000.0))
    assert session.told(400 + TOLD_MS) == [], "its connection has not stood for long"
    session.connection = None
    assert session.told(600 + TOLD_MS) == [], "it has no connection"
    session.connection = object()  # type: ignore[assignment]
    assert session.told(600 + TOLD_MS) == [1]
    assert session.known("r") is None
    assert list(session.endings) == [2]
    assert session.told(2000 + TOLD_MS) == [2]


def test_only_the_last_endings_are_kept() -> None:
    session = Session(None, "key")
    for id_ in range(ENDINGS + 3):
        session.keep(ending(id_, id_))
    assert session.told(0) == [0, 1, 2]
    assert len(session.endings) == ENDINGS


def test_a_session_waits_for_its_next_connection_only_if_there_is_something_to_say() -> None:
    sessions = Sessions()
    session, resumed = sessions.enter(SECRET, 1000)
    assert not resumed
    sessions.leave(session, 0)
    session, resumed = sessions.enter(SECRET, 1000)
    assert not resumed, "it had nothing"
    session.keep(ending(1, 0))
    sessions.leave(session, 10.5)
    again, resumed = sessions.enter(SECRET, 500)
    assert resumed
    assert again is session
    assert sessions.ended(1e9) == [], "it is connected"
    sessions.leave(session, 10.5)
    assert sessions.ended(510) == []
    assert sessions.ended(511) == [session]
    assert list(sessions) == []


def test_what_was_loaded_belongs_to_its_sessions_again() -> None:
    sessions = Sessions()
    origin = StoredOrigin(key_of(SECRET), 1000.0)
    mine, nobody_s = ask(origin=origin), ask(origin=Session(None))
    sessions.restore([mine, nobody_s], [ending(7, 0, "e")], 100)
    session, resumed = sessions.enter(SECRET, 1000)
    assert resumed
    assert mine.origin is session
    assert nobody_s.origin is None
    assert list(session.bound.values()) == [mine]
    assert session.known("r") is mine
    assert session.known("e") is session.endings[7]


def test_who_has_a_new_ending_gives_up_its_oldest_where_all_have_too_many() -> None:
    session = Session(None, "key")
    for id_ in range(10):
        session.keep(ending(id_, id_))
    assert session.told(0, too_many=3) == [0, 1, 2]
    assert session.told(0, too_many=-5) == []
