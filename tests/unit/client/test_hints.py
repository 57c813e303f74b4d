"""The hint of a `QueueTimeout` whose request was blocked by its own process."""

from __future__ import annotations

import pytest

from genie import QueueTimeout
from support.network.scripted_server import connected_session, granted_request, released, sent_request


def blocker(id: int, transaction: str | None = None, resource: str = "a", state: str = "held") -> dict[str, object]:
    name = {} if transaction is None else {"transactionName": transaction}
    return {"id": id, "resource": resource, "mode": "exclusive", "state": state, "since": 5, **name}


def timeout(session, *blockers: dict[str, object], id: int = 902, **options: object) -> QueueTimeout:
    """What a request of this client ends with that these were in the way of."""
    request = sent_request(session, **options)
    answer = released(id, "queue-timeout", request.ref, waited=10, blockers=blockers, blockersTotal=len(blockers))
    [(_, _, error)] = session.receive_data(answer, 0.0)
    assert isinstance(error, QueueTimeout)
    return error


def test_it_is_a_timeout_error():
    error = QueueTimeout(id=1, waited=2)
    assert isinstance(error, TimeoutError)
    assert str(error) == "request 1 was not granted within 2.000 s"
    assert str(QueueTimeout(id=1, waited=0)) == "request 1 was not granted immediately"


@pytest.mark.parametrize(("its", "asked"), [(None, None), ("t", None), (None, "t")])
def test_a_request_blocked_by_its_own_client_gets_a_hint(its, asked):
    session = connected_session()
    granted_request(session, 901, transaction=its)
    error = timeout(session, blocker(900), blocker(901, its), transaction=asked)
    assert error.hint.startswith("this client itself holds 901: ")
    assert "run_transaction" in error.hint
    assert error.hint in str(error)


def test_a_request_blocked_by_another_client_of_the_process_gets_a_hint():
    session, other = connected_session(), connected_session()
    granted_request(other, 903)
    error = timeout(session, blocker(903))
    assert error.hint.startswith("another client of this process itself holds 903: ")


@pytest.mark.parametrize(
    "row",
    [blocker(904, "t"), blocker(905), blocker(904, resource="b"), blocker(904, state="queued")],
    ids=["transactions of two names", "another process", "another server's id", "ahead in the queue"],
)
def test_blockers_of_other_processes_cause_no_hint(row):
    session = connected_session()
    granted_request(session, 904, transaction="t")
    error = timeout(session, row, transaction="u")
    assert error.hint == ""


def test_a_released_lock_causes_no_hint():
    session = connected_session()
    session.requests.release(granted_request(session, 906), 0.0)
    session.data_to_send()
    assert timeout(session, blocker(906)).hint == ""


def test_a_lost_lock_causes_no_hint():
    session = connected_session()
    granted_request(session, 907)
    session.receive_data(released(907, "transaction-timeout", "1"), 0.0)
    assert timeout(session, blocker(907), id=908).hint == ""
