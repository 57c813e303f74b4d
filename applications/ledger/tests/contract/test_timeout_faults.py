"""A fault at any statement of a run rolls it back completely, and the next run repeats it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import make_url

from genie.sql import engine
from genie_ledger import DatabaseFailed, TimeoutHandler, TimeoutRun
from ledgers import FUTURE, OURS, PAST, Books, Desk, Fault, New, cut, refuse
from support.network.proxy import proxy
from support.processes.servers import WAIT_S

MAX_STATEMENTS = 200
"""More statements than a run or the creation of the tables has."""


@pytest.fixture(params=["sqlite-refuse", "postgres-refuse", "mariadb-refuse", "postgres-cut", "mariadb-cut"])
async def faulty(request: pytest.FixtureRequest, new_books: New) -> Any:
    """A ledger, and what happens to it."""
    kind, _, how = request.param.partition("-")
    return await new_books(kind), {"refuse": refuse, "cut": cut}[how]


async def rows_in_every_state(books: Books, desk: Desk) -> TimeoutHandler:
    """A ledger whose next run has something to do at each of its steps."""
    handler = books.handler(desk.take, longest_transaction=0)
    for id in ("ends", "moved", "refused", "later"):
        await books.add_transfer(id, FUTURE)
    await books.move("refused", PAST)
    desk.refused = {"refused"}
    await handler.run_once()
    desk.refused = set()
    await books.run("UPDATE `timeoutInterval` SET `changes` = `changes` - 1")  # one was committed late
    await books.change("ends", "COMMITTED")
    await books.move("moved", 2 * PAST)
    await books.move("later", FUTURE + 1)
    await books.add_transfer("new", 3 * PAST)
    await books.add_transfer("new, too", FUTURE)
    desk.given.clear()
    return handler


async def run_or_error(handler: TimeoutHandler) -> TimeoutRun | str | None:
    """What a run says when it fails, or has done."""
    try:
        return await handler.run_once()
    except DatabaseFailed as error:
        said = str(error)
    assert "\n" not in said, "it is one line"
    return said


async def test_a_fault_at_any_statement_rolls_back_the_run(faulty: tuple[Books, Callable[[Any], None]]) -> None:
    books, cause = faulty
    desk = Desk()
    handler = await rows_in_every_state(books, desk)
    before, statements = await books.ours(), []
    for number in range(1, MAX_STATEMENTS):
        with Fault(handler, number, cause) as fault:
            done = await run_or_error(handler)
        if not isinstance(done, str):
            break
        assert done.startswith(handler._database.name)
        assert await books.ours() == before, fault.statement
        statements.append(fault.statement)
    assert not isinstance(done, str)
    assert done is not None, "the fault has left the turn taken"
    assert (done.cleaned, done.inserted, done.expired, done.rejected) == (1, 2, 3, 0)
    assert {"COMMIT"} < set(statements)
    written = [statement for statement in statements if statement.startswith(("UPDATE", "INSERT", "DELETE"))]
    writes = {"sqlite": 5, "postgres": 7, "mariadb": 8}[books.kind]
    assert len(written) == 2 * writes, "after the first fault each run rehearses its writes"
    assert all(ids == ["new", "moved", "refused"] for ids in desk.given), desk.given
    assert len(desk.given) > writes, "what was not written down comes again"
    assert await books.expired() == {"new", "moved", "refused"}
    assert await books.kept() == {"new": True, "moved": True, "refused": True, "later": False, "new, too": False}
    again = None
    async with asyncio.timeout(WAIT_S):  # the server may notice late that the connection that had the lock was closed
        while again is None:
            again = await handler.run_once()
    assert again.expired == 0


async def test_a_fault_during_the_creation_of_tables_is_recovered(books: Books) -> None:
    """Some faults have no effect, for example at the statement that releases the lock."""
    desk = Desk()
    for table in OURS:
        await books.run(f"DROP TABLE `{table}`")
    for number in range(1, MAX_STATEMENTS):
        handler = books.handler(desk.take)
        with Fault(handler, number, refuse) as fault:
            try:
                await handler.open()
            except DatabaseFailed:
                assert fault.happened
            finally:
                await handler.close()
        if not fault.happened:
            break
    assert not fault.happened
    await books.add_transfer("a", PAST)
    await books.handler(desk.take).run_once()
    assert desk.ids == ["a"]


TRIGGERS = {
    "sqlite": (
        "CREATE TRIGGER no BEFORE INSERT ON `transferTimeout` BEGIN SELECT RAISE(ABORT, 'no rows today'); END",
        "DROP TRIGGER no",
    ),
    "postgres": (
        "CREATE FUNCTION no() RETURNS trigger AS 'BEGIN RAISE EXCEPTION ''no rows today''; END' LANGUAGE plpgsql",
        "CREATE TRIGGER no BEFORE INSERT ON `transferTimeout` EXECUTE FUNCTION no()",
        "DROP TRIGGER no ON `transferTimeout`",
    ),
    "mariadb": (
        "CREATE TRIGGER no BEFORE INSERT ON `transferTimeout` FOR EACH ROW SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no rows today'",
        "DROP TRIGGER no",
    ),
}


async def test_a_lasting_fault_of_the_writes_does_not_repeat_the_delivery(books: Books) -> None:
    """The first delivery, and each after a failed commit, follows a rehearsal of the writes."""
    desk = Desk()
    handler = books.handler(desk.take)
    for number in range(3):
        await books.add_transfer(f"{number}", PAST)
    before = await books.ours()
    *made, ended = TRIGGERS[books.kind]
    for statement in made:
        await books.run(statement)
    for _ in range(3):
        assert "no rows today" in str(await run_or_error(handler))
    assert (desk.given, await books.ours()) == ([], before)
    await books.run(ended)
    await handler.run_once()
    assert (desk.given, await books.kept()) == ([["0", "1", "2"]], {"0": True, "1": True, "2": True})
    await books.add_transfer("a", PAST)
    await books.run(made[-1])
    for _ in range(3):
        assert "no rows today" in str(await run_or_error(handler))
    assert desk.given[1:] == [["a"]], "only the first of these runs takes the writes for possible"
    await books.run(ended)
    await handler.run_once()
    await books.add_transfer("b", PAST)
    await handler.run_once()
    assert desk.given[1:] == [["a"], ["a"], ["b"]]


@pytest.mark.parametrize("table", OURS)
async def test_the_rehearsal_includes_every_table(books: Books, table: str) -> None:
    if (books.kind, table) == ("sqlite", "timeoutInterval"):
        pytest.skip("SQLite has no late commits, and no windows to recheck")
    desk = Desk()
    await books.add_transfer("a", PAST)
    for statement in TRIGGERS[books.kind][:-1]:
        await books.run(statement.replace("transferTimeout", table))
    assert "no rows today" in str(await run_or_error(books.handler(desk.take)))
    assert desk.given == []


@pytest.mark.server
async def test_the_connection_is_lost_while_rows_are_inserted(new_books: New) -> None:
    """In PostgreSQL they don't go there by a statement."""
    books = await new_books("postgres")
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)
    before = await books.ours()
    made, trigger, ended = TRIGGERS["postgres"]
    cut_off = "PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(30)"
    await books.run(made.replace("RAISE EXCEPTION ''no rows today''", cut_off))
    await books.run(trigger)
    with pytest.raises(DatabaseFailed) as failed:
        await handler.run_once()
    assert "\n" not in str(failed.value)
    assert await books.ours() == before
    await books.run(ended)
    await handler.run_once()
    assert desk.given == [["a"]], "the rehearsal has failed"


async def test_the_connection_that_holds_the_lock_is_lost_during_the_delivery(new_books: New, other_kind: str) -> None:
    books = await new_books(other_kind)
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)

    async def cut_all_connections(_ids: list[str]) -> None:
        if books.kind == "postgres":
            await books.run(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        else:
            others = "ID <> CONNECTION_ID() AND DB = DATABASE()"
            for (id,) in await books.run("SELECT ID FROM information_schema.PROCESSLIST WHERE " + others):  # noqa: S608
                await books.run(f"KILL {id}")

    desk.meanwhile = cut_all_connections
    for _ in range(2):
        before = await books.ours()
        done = await run_or_error(handler)
        assert done is not None
        assert not isinstance(done, str) or await books.ours() == before
    desk.meanwhile = None
    assert await handler.run_once() is not None
    assert await books.kept() == {"a": True}


def _whole(data: bytes) -> Iterator[tuple[bytes, str]]:
    yield data, "data"


@pytest.mark.server
@pytest.mark.parametrize("when", ["before the run", "during the delivery"])
async def test_half_open_connections_are_replaced(
    new_books: New, other_kind: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler whose connections forward nothing any more reports it, and continues with new ones."""
    books = await new_books(other_kind)
    desk = Desk()
    url = make_url(books.url)
    assert url.port is not None
    async with proxy(url.port, _whole) as proxy_, asyncio.timeout(WAIT_S):
        handler = TimeoutHandler(url.set(port=proxy_.port).render_as_string(), on_expired=desk.take)
        await books.add_transfer("a", PAST)

        async def stall(_ids: list[str]) -> None:
            for name in ("OPEN_TIMEOUT_S", "CLOSE_TIMEOUT_S", "RELEASE_TIMEOUT_S"):
                monkeypatch.setattr(engine, name, 1.0)
            proxy_.stall()

        if when == "before the run":
            await handler.run_once()
            await stall([])
        else:
            desk.meanwhile = stall
        assert str(await run_or_error(handler)).endswith(": TimeoutError")
        desk.meanwhile = None
        monkeypatch.setattr(engine, "OPEN_TIMEOUT_S", WAIT_S)
        proxy_.cut()  # now the server releases the lock
        while not isinstance(await run_or_error(handler), TimeoutRun):  # noqa: ASYNC110 - of the server
            await asyncio.sleep(0.1)
        assert await books.kept() == {"a": True}
        proxy_.stall()
        await handler.close()


@pytest.fixture(params=["postgres", "mariadb"])
def other_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
