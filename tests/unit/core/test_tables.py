"""Dicts from which most items were removed: their memory is freed, and an iteration does not skip the slots of removed items."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest

from genie.core import LockManager, Release, Request
from genie.core.deadlines import Deadlines
from genie.core.lock_table import Transaction
from genie.core.model import details_of
from genie.core.special import Counted
from genie.core.tables import CHECKED_SIZES, MAX_ITEM_BYTES, MAX_ORDERED_ITEM_BYTES, compact, ordered
from genie.server.sessions import Session
from genie.storage.store import RetainedReply

MANY = 3_000
MAX_BYTES = 2_048
MAX_BYTES_OF_FEW = 16_384
"""Bytes of a dict with one item, and the slots of a few removed items. The second: of a dict that is one of few."""


def lock(
    manager: LockManager, *exclusive: str, shared: tuple[str, ...] = (), transaction: str | None = None
) -> Request:
    request = Request(shared, exclusive, 1e9, 1e9, transaction)
    manager.step(request, 0)
    return request


def release_all_but_last(manager: LockManager, requests: list[Request]) -> None:
    for request in requests[:-1]:
        manager.step(Release(request.id), 0)


def of_holders() -> dict[int, Request]:
    manager = LockManager()
    release_all_but_last(manager, [lock(manager, shared=("A",)) for _ in range(MANY)])
    return manager.table.resources["A"].holders


def of_holders_of_units() -> dict[int, Request]:
    manager, requests = LockManager(), []
    for _ in range(MANY):
        request = Request((), (), 1e9, 1e9)
        request.details = details_of((), (), {"A": (1, MANY)})
        manager.step(request, 0)
        requests.append(request)
    release_all_but_last(manager, requests)
    return manager.table.resources["A"].holders


def of_held() -> dict[int, Request]:
    manager = LockManager()
    release_all_but_last(manager, [lock(manager, f"{number}", transaction="T") for number in range(MANY)])
    return manager.table.transactions["T"].held


def of_held_on_one_name() -> dict[int, Request]:
    manager = LockManager()
    release_all_but_last(manager, [lock(manager, shared=("A",), transaction="T") for _ in range(MANY)])
    return manager.table.transactions["T"].held


def of_grants(names: int) -> dict[str, int]:
    manager, counts = LockManager(), [names] * (MANY // names) + [1]
    requests = [
        lock(manager, *[f"{number}/{each}" for each in range(count)], transaction="T")
        for number, count in enumerate(counts)
    ]
    release_all_but_last(manager, requests)
    return manager.table.transactions["T"].grants


def of_shared_grants() -> dict[str, int]:
    manager = LockManager()
    requests = [lock(manager, shared=(f"{number}",), transaction="T") for number in range(MANY)]
    release_all_but_last(manager, requests)
    return manager.table.transactions["T"].grants


def transaction_without_steps() -> Transaction:
    manager, origin = LockManager(), Session(None)
    requests = [Request((), (f"{number}",), transaction="T", origin=origin) for number in range(MANY)]
    for request in requests:
        assert manager.grant_if_uncontended(request, 0)
    for request in requests[:-1]:
        assert manager.release_if_uncontended(request.id, origin) is request
    return manager.table.transactions["T"]


def of_waiting() -> dict[int, Request]:
    manager = LockManager()
    lock(manager, "A")
    release_all_but_last(manager, [lock(manager, "A", transaction="T") for _ in range(MANY)])
    return manager.table.transactions["T"].waiting


def of_deadlines() -> dict[int, None]:
    deadlines = Deadlines()
    for id_ in range(MANY):
        deadlines.add(1, id_)
    for id_ in range(MANY - 1):
        deadlines.discard(1, id_)
    return deadlines._ticks[1]


def of_units() -> dict[int | str, int]:
    counted = Counted()
    for number in range(MANY):
        counted.add(f"{number}", 1)
    for number in range(MANY - 1):
        counted.remove(f"{number}", 1)
    return counted.held_by_transaction


def of_asked_units() -> dict[str, tuple[int, int, int]]:
    counted = Counted()
    for number in range(MANY):
        counted.begin_wait(f"{number}", (1, 1))
    for number in range(MANY - 1):
        counted.end_wait(f"{number}", 1)
    return counted.waiting_by_transaction


def session() -> Session:
    session = Session(None, key="k")
    requests = [Request(exclusive=("A",), ref=f"{number}") for number in range(MANY)]
    for id_, request in enumerate(requests):
        request.id = id_
        session.add_granted(request)
    session.live_requests = MANY
    for request in requests[:-1]:
        session.remove(request)
    return session


def of_session_whose_requests_were_granted() -> dict[int, Request]:
    session = Session(None)
    requests = [Request(exclusive=("A",)) for _ in range(MANY)]
    for id_, request in enumerate(requests):
        request.id = id_
        session.add_queued(request)
    for request in requests[:-1]:
        session.on_granted(request)
    return session.bound


def of_refs_of_replies() -> dict[str, Request | RetainedReply]:
    session = Session(None, key="k")
    for id_ in range(MANY):
        session.retain(RetainedReply(id_, f"{id_}", session, 0.0, b""))
    for _ in range(MANY - 1):
        session.drop_oldest_reply()
    return session._refs


DICTS: dict[str, Callable[[], dict]] = {  # type: ignore[type-arg]
    "holders": of_holders,
    "holders of units": of_holders_of_units,
    "held": of_held,
    "held on one name": of_held_on_one_name,
    "grants": lambda: of_grants(1),
    "grants of requests with many names": lambda: of_grants(300),
    "shared grants": of_shared_grants,
    "held without steps": lambda: transaction_without_steps().held,
    "grants without steps": lambda: transaction_without_steps().grants,
    "waiting": of_waiting,
    "units": of_units,
    "asked units": of_asked_units,
}
FEW_DICTS: dict[str, Callable[[], dict]] = {  # type: ignore[type-arg]
    "deadlines": of_deadlines,
    "session's requests": lambda: session().bound,
    "session's requests that waited": of_session_whose_requests_were_granted,
    "session's refs": lambda: session()._refs,
    "session's refs of replies": of_refs_of_replies,
}


@pytest.mark.parametrize("name", [*DICTS, *FEW_DICTS])
def test_the_memory_of_removed_items_is_freed(name: str) -> None:
    table = (DICTS | FEW_DICTS)[name]()
    assert len(table) == 1
    assert table.__sizeof__() <= (MAX_BYTES if name in DICTS else MAX_BYTES_OF_FEW)


@pytest.mark.parametrize("name", ["holders", "waiting"])
def test_dicts_that_are_iterated_often_skip_nothing(name: str) -> None:
    assert type(DICTS[name]()) is OrderedDict


@pytest.mark.parametrize("make", [dict, OrderedDict])
def test_a_dict_that_has_just_grown_or_was_compacted_is_not_compacted(make: type[dict[int, int]]) -> None:
    """Otherwise requests that come and go at a checked size would copy the dict each time."""
    limit = MAX_ITEM_BYTES if make is dict else MAX_ORDERED_ITEM_BYTES
    table, number = make(), 0
    for size in sorted(CHECKED_SIZES)[:12]:
        while len(table) < size:
            table[number] = number
            number += 1
            assert len(table) < 8 or table.__sizeof__() <= limit * len(table)
        for _ in range(4 * size):  # the oldest item is replaced
            table[number] = number
            number += 1
            del table[next(iter(table))]
            assert table.__sizeof__() <= limit * len(table)
    for key in list(table)[:-9]:
        del table[key]
    expected = list(table.items())
    compact(table)
    assert list(table.items()) == expected
    assert type(table) is make
    assert table.__sizeof__() <= limit * len(table)


def test_an_ordered_dict_stays_the_same() -> None:
    table = ordered({2: "b", 1: "a"})
    assert list(table) == [2, 1]
    assert ordered(table) is table
