"""Repeated delivery of a transfer that was final in between, or whose date was moved to a later one."""

from __future__ import annotations

import pytest

from ledgers import FUTURE, PAST, Books, Desk, New, catch_up


async def test_final_and_reopened_between_two_runs(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)
    await books.add_transfer("b", PAST)
    await handler.run_once()
    async with books.transaction() as entries:
        await entries.change("a", "EXPIRED_RESERVED")
        await entries.change("a", "RESERVED")
        await entries.change("b", "RESERVED")
    run = await handler.run_once()
    assert run is not None
    assert (run.cleaned, run.inserted, run.expired) == (0, 0, 1)
    assert desk.given == [["a", "b"], ["a"]], "b has not been final"
    assert await books.kept() == {"a": True, "b": True}
    for _ in range(2):
        await handler.run_once()
    await books.set_back(0)
    await catch_up(books.handler(desk.take))
    assert desk.given == [["a", "b"], ["a"]], "the same state changes read again are no new ones"


async def test_final_and_reopened_during_the_delivery(books: Books) -> None:
    """The function that deals with it writes the final state itself, as the handler of the document does."""
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)

    async def expire_and_reopen(ids: list[str]) -> None:
        desk.meanwhile = None
        for id in ids:
            await books.change(id, "EXPIRED_RESERVED")
            await books.change(id, "RESERVED")

    desk.meanwhile = expire_and_reopen
    for _ in range(3):
        await handler.run_once()
    assert desk.given == [["a"], ["a"]]


@pytest.mark.parametrize("batch", [1, 2, 100])
async def test_a_final_state_before_the_delivery_counts_only_once(books: Books, batch: int) -> None:
    """A handler that is behind hands over by the last state, and reads the final state that came before it later."""
    desk = Desk()
    await books.add_transfer("a", FUTURE)
    await books.add_transfer("b", FUTURE)
    await books.handler(desk.take).run_once()
    await books.move("a", PAST)
    for id, state in (("b", "RESERVED"), ("a", "ABORTED"), ("b", "RESERVED"), ("a", "RESERVED")):
        await books.change(id, state)
    handler = books.handler(desk.take, batch=batch)
    for _ in range(2):
        await catch_up(handler)
    assert desk.given == [["a"]]


async def test_final_then_in_an_unknown_state_then_reopened(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)
    await handler.run_once()
    await books.change("a", "FAILED")
    await books.change("a", "SUSPENDED")
    await handler.run_once()
    assert (desk.given, await books.kept()) == ([["a"]], {"a": False}), "it waits: it can't be delivered in this state"
    await books.change("a", "RESERVED")
    await handler.run_once()
    await handler.run_once()
    assert desk.given == [["a"], ["a"]]


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
async def test_a_final_state_committed_late(kind: str, new_books: New) -> None:
    """Its id is below the segment and between those of states that were read already."""
    books = await new_books(kind)
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)
    await books.add_transfer("b", PAST)
    await handler.run_once()
    async with books.transaction() as late:
        await late.change("a", "ABORTED")
        await books.change("b", "SUSPENDED")
        await handler.run_once()
        await books.change("a", "RESERVED")
        await handler.run_once()
        assert desk.given == [["a", "b"]]
    await handler.run_once()
    await handler.run_once()
    assert desk.given == [["a", "b"], ["a"]]


async def test_a_rejected_repetition_is_delivered_again(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)
    await handler.run_once()
    await books.change("a", "ABORTED")
    await books.change("a", "RESERVED")
    desk.refused = {"a"}
    await handler.run_once()
    assert await books.kept() == {"a": False}
    desk.refused = set()
    await handler.run_once()
    await handler.run_once()
    assert desk.given == [["a"]] * 3


async def test_a_transfer_with_a_later_date_is_delivered_again_after_it(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", 3 * PAST)
    await books.add_transfer("b", 3 * PAST)
    await handler.run_once()
    await books.move("a", FUTURE)
    await handler.run_once()
    assert await books.kept() == {"a": False, "b": True}
    await books.move("a", PAST)
    await handler.run_once()
    await handler.run_once()
    assert desk.given == [["a", "b"], ["a"]]


async def test_a_later_date_that_passes_before_the_next_run(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", 4 * PAST)
    await handler.run_once()
    for expires, times in ((2 * PAST, 2), (3 * PAST, 2), (2.5 * PAST, 2), (PAST, 3)):
        await books.move("a", expires)
        await handler.run_once()
        await handler.run_once()
        assert desk.given == [["a"]] * times, f"{expires} hours: only what is later than when it was delivered counts"


async def test_a_date_extended_during_the_delivery(books: Books) -> None:
    """The function that deals with it prolongs it. Its row was there with another date, or is written by the same run."""
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("there", FUTURE)
    await handler.run_once()
    await books.move("there", 3 * PAST)
    await books.add_transfer("new", 2 * PAST)

    async def prolong(ids: list[str]) -> None:
        desk.meanwhile = None
        for id in ids:
            await books.move(id, FUTURE / 2)

    desk.meanwhile = prolong
    await handler.run_once()
    assert desk.given == [["there", "new"]]
    await handler.run_once()
    assert await books.kept() == {"there": False, "new": False}
    await books.move("there", PAST)
    await books.move("new", PAST)
    await handler.run_once()
    await handler.run_once()
    assert [sorted(ids) for ids in desk.given[1:]] == [["new", "there"]]


async def test_a_date_later_by_a_fraction_of_a_second_is_ignored(books: Books) -> None:
    """A copy of whole seconds is what the document has."""
    desk = Desk()
    await books.add_transfer("a", PAST)
    handler = books.handler(desk.take)
    await handler.run_once()
    ((date,),) = await books.run("SELECT `expirationDate` FROM `transferTimeout`")
    before = f"{date}"[:19]
    await books.run(f"UPDATE `transfer` SET `expirationDate` = '{before}.9'")  # noqa: S608 - ours
    await handler.run_once()
    assert desk.given == [["a"]]
