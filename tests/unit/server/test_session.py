from __future__ import annotations

import pytest

from genie.core import Request
from genie.server import session as module
from genie.server.session import Session, same


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
