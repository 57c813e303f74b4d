"""Token stores in databases: tables, query plans, concurrent processes, and reconnects."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sqlite3
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

import spending_process
from genie.sql import engine as engine_module
from genie.sql.schema_check import WrongSchema
from genie_tokens.errors import InsufficientFunds
from genie_tokens.store import Added, Change, Resync, Spent
from genie_tokens.stores import postgres as postgres_module
from genie_tokens.stores import sql as sql_module
from genie_tokens.stores import sqlite as sqlite_module
from genie_tokens.stores.schema import unspent_page
from genie_tokens.stores.sql import SqlTokenStore
from genie_tokens.sync import InMemorySelector
from support.databases.postgres import Postgres, postgres
from support.network.proxy import proxy
from support.processes.servers import WAIT_S
from tokens_made import ids, token

OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
"""The other connections of a database of PostgreSQL."""


class Database:
    """An empty database, and a way into it that is not the store's."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.url = f"sqlite+aiosqlite:///{folder}/tokens.db" if kind == "sqlite" else postgres().new_database()
        self.name = make_url(self.url).database or ""

    def run(self, statement: str) -> str:
        """The rows that a statement finds, as text."""
        if self.kind == "postgres":
            return postgres().run(statement, self.name)
        with closing(sqlite3.connect(self.name)) as connection, connection:
            return "\n".join("|".join(map(str, row)) for row in connection.execute(statement))


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    return Database(request.param, tmp_path)


@pytest.fixture
def sqlite_file(tmp_path: Path) -> Database:
    return Database("sqlite", tmp_path)


@pytest.fixture
def postgres_database(tmp_path: Path) -> Database:
    return Database("postgres", tmp_path)


async def next_change(changes: AsyncIterator[Change]) -> Change:
    async with asyncio.timeout(WAIT_S):
        return await anext(changes)


async def ask(process: Process, **asked: Any) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    if asked:
        process.stdin.write(json.dumps(asked).encode() + b"\n")
    async with asyncio.timeout(WAIT_S):
        return json.loads(await process.stdout.readline())


@asynccontextmanager
async def another_process(url: str) -> AsyncIterator[Process]:
    script = spending_process.__file__
    assert script
    process = await asyncio.create_subprocess_exec(sys.executable, script, url, stdin=PIPE, stdout=PIPE)
    try:
        assert await ask(process) is True
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


# -- tables ---------------------------------------------------------------------------------------------------


async def test_tables_are_created_once_by_concurrent_processes(database: Database) -> None:
    stores = [SqlTokenStore(database.url) for _ in range(8)]
    await asyncio.gather(*(store.add([token(f"{number}")]) for number, store in enumerate(stores)))
    assert await ids(stores[0]) == {f"{number}" for number in range(8)}
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_table_with_the_needed_columns_is_accepted(database: Database) -> None:
    async with SqlTokenStore(database.url) as store:
        await store.add([token("a")])
    database.run("ALTER TABLE tokens ADD COLUMN note TEXT")
    database.run(
        "INSERT INTO tokens (id, owner, token_type, identifier, amount) VALUES ('b', 'alice', 'Fiat', 'GBP', 1)"
    )
    async with SqlTokenStore(database.url) as store:
        assert await store.get(["a", "b"]) == {"a": token("a"), "b": token("b")}


async def test_the_errors_of_a_table_are_listed(database: Database) -> None:
    wide = "INTEGER" if database.kind == "postgres" else "TEXT"
    database.run(
        f"CREATE TABLE tokens (id TEXT, owner INTEGER, account TEXT NOT NULL, token_type TEXT, identifier TEXT, "
        f"amount {wide}, issuer VARCHAR(40), metadata TEXT, spent_by TEXT)"
    )
    store = SqlTokenStore(database.url)
    with pytest.raises(WrongSchema) as refused:
        await store.add([token("a")])
    assert str(refused.value).split("; ") == [
        "table tokens: column owner is INTEGER, it must be TEXT",
        "table tokens: column account is NOT NULL, it must be nullable",
        f"table tokens: column amount is {wide}, it must be BIGINT",
        "table tokens: column notary is missing",
        "table tokens: its primary key is not id",
        "table tokens: it has no index on (token_type, identifier, account, id) where spent_by is null",
        "table tokens: it has no index on (token_type, identifier, owner, id) where spent_by is null",
    ]
    await store.close()
    with pytest.raises(WrongSchema):
        async with SqlTokenStore(database.url):
            pytest.fail("it was opened")


async def test_a_page_is_an_index_range_scan(database: Database) -> None:
    async with SqlTokenStore(database.url) as store:
        numbers = range(16_000)
        await store.add([token(f"{n:05}", owner=f"o{n % 2}", account=f"a{n % 2}" if n % 5 else None) for n in numbers])
        await store.spend([token(f"{n:05}") for n in numbers if not n % 4], transaction="T")
    database.run("ANALYZE")
    dialect, explain = (
        (postgresql.dialect(), "EXPLAIN") if database.kind == "postgres" else (sqlite.dialect(), "EXPLAIN QUERY PLAN")
    )
    kind = {"token_type": "Fiat", "identifier": "GBP"}
    for wanted, index in [
        ({"owner": "o1", **kind}, "tokens_unspent_by_owner"),
        ({"account": "a1", **kind}, "tokens_unspent_by_account"),
        ({}, "tokens_unspent_by_owner"),
        (kind, "tokens_unspent_by_owner"),
    ]:
        for after in (None, token("00500", owner="o1", account="a1")):
            query = unspent_page(wanted, after).compile(dialect=dialect, compile_kwargs={"literal_binds": True})
            plan = database.run(f"{explain} {query}")
            assert index in plan, plan
            assert "Sort" not in plan, plan
            assert "TEMP B-TREE" not in plan, plan


@pytest.mark.parametrize("url", ["sqlite+aiosqlite://", "sqlite+aiosqlite:///:memory:"])
def test_sqlite_in_memory_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="name a file, or use MemoryTokenStore"):
        SqlTokenStore(url)


@pytest.mark.parametrize("url", ["mysql://root:secret@h/d", "sqlite:///tokens.db", "postgresql://me:secret@h/d"])
def test_an_unsupported_database_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"begin with sqlite\+aiosqlite or postgresql\+asyncpg, not") as refused:
        SqlTokenStore(url)
    assert "secret" not in str(refused.value)


async def test_a_closed_store_can_not_be_reopened(database: Database) -> None:
    store = SqlTokenStore(database.url)
    await store.add([token("a")])
    adding = asyncio.ensure_future(store.add([token("b")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await store.close()
    await asyncio.wait({adding})
    with pytest.raises(RuntimeError, match="the token store is closed"):
        await store.get(["a"])
    assert database.run("SELECT count(*) FROM tokens") == ("1" if adding.exception() else "2")


async def test_database_errors_are_propagated(tmp_path: Path) -> None:
    store = SqlTokenStore(f"sqlite+aiosqlite:///{tmp_path}/nowhere/tokens.db")
    with pytest.raises(DBAPIError, match="unable to open database file"):
        await store.add([token("a")])
    with pytest.raises(DBAPIError, match="unable to open database file"):
        await anext(store.changes())
    (tmp_path / "nowhere").mkdir()
    await store.add([token("a")])
    await store.close()


# -- other processes --------------------------------------------------------------------------------------------


async def test_changes_of_another_process_are_received(database: Database) -> None:
    async with SqlTokenStore(database.url) as store, another_process(database.url) as other:
        changes = store.changes()
        assert await next_change(changes) == Resync()
        assert await ask(other, add=["a", "b"])
        assert [await next_change(changes), await next_change(changes)] == [Added(token("a")), Added(token("b"))]
        assert await ask(other, spend=[["T", ["a"], ["c"]]]) == ["T"]
        assert [await next_change(changes), await next_change(changes)] == [Spent("a"), Added(token("c"))]


async def test_two_processes_never_spend_a_token_twice(database: Database) -> None:
    chance = random.Random(11)  # noqa: S311
    names = [f"{number}" for number in range(120)]
    sets = {
        f"{process}.{number}": chance.sample(names, chance.randint(1, 4)) for process in "AB" for number in range(100)
    }
    async with SqlTokenStore(database.url) as store:
        await store.add([token(name) for name in names])
    async with another_process(database.url) as one, another_process(database.url) as two:
        done = await asyncio.gather(
            *(
                ask(process, spend=[[name, asked, [f"out{name}"]] for name, asked in sets.items() if name[0] == mark])
                for process, mark in ((one, "A"), (two, "B"))
            )
        )
    assert all(done), "both have spent something"
    spent = [name for transaction in done[0] + done[1] for name in sets[transaction]]
    assert len(spent) == len(set(spent)), "a token was spent by two transactions"
    rows = dict(row.split("|") for row in database.run("SELECT id, coalesce(spent_by, '') FROM tokens").splitlines())
    by = {name: transaction for transaction in done[0] + done[1] for name in sets[transaction]}
    assert {name: rows[name] for name in names} == {name: by.get(name, "") for name in names}
    assert rows.keys() - set(names) == {f"out{transaction}" for transaction in done[0] + done[1]}


# -- SQLite -----------------------------------------------------------------------------------------------------


async def test_a_reader_whose_log_was_truncated_gets_a_resync(
    sqlite_file: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "MAX_LOG_ROWS", 5)
    monkeypatch.setattr(sqlite_module, "TRIM_INTERVAL_ROWS", 1)
    monkeypatch.setattr(sqlite_module, "POLL_INTERVAL_S", 3_600)
    async with SqlTokenStore(sqlite_file.url) as store:
        changes = store.changes()
        assert await next_change(changes) == Resync()
        for number in range(20):
            await store.add([token(f"{number}")])
        assert sqlite_file.run("SELECT min(sequence), max(sequence) FROM token_changes") == "16|20"
        store._listener._wake.set()
        assert await next_change(changes) == Resync()
        await store.add([token("a")])
        store._listener._wake.set()
        assert await next_change(changes) == Added(token("a"))


async def test_it_waits_for_a_foreign_writer(sqlite_file: Database) -> None:
    """Somebody else's transaction is open: ours waits for its end, and then sees what it did."""
    async with SqlTokenStore(sqlite_file.url) as store:
        await store.add([token("a")])
        with closing(sqlite3.connect(sqlite_file.name, isolation_level=None)) as foreign:
            foreign.execute("BEGIN IMMEDIATE")
            foreign.execute("UPDATE tokens SET spent_by = 'foreign'")
            spending = asyncio.ensure_future(store.spend([token("a")], transaction="T"))
            assert await ids(store) == {"a"}, "readers don't wait"
            assert not spending.done()
            foreign.execute("COMMIT")
        await asyncio.wait({spending})
        assert "spent by another" in str(spending.exception())


# -- PostgreSQL -------------------------------------------------------------------------------------------------


@pytest.mark.server
async def test_lost_connections_cause_a_resync(postgres_database: Database, caplog: pytest.LogCaptureFixture) -> None:
    async with SqlTokenStore(postgres_database.url) as store, SqlTokenStore(postgres_database.url) as other:
        await store.add([token("a")])
        changes = store.changes()
        assert await next_change(changes) == Resync()
        postgres_database.run(f"SELECT pg_terminate_backend(pid, 5000) {OTHERS}")
        assert await next_change(changes) == Resync()
        assert "change feed lost" in caplog.text
        await store.spend([token("a")], transaction="T", outputs=[token("b")])
        assert [await next_change(changes), await next_change(changes)] == [Spent("a"), Added(token("b"))]
        await other.add([token("c")])
        assert await next_change(changes) == Added(token("c"))


def _whole(data: bytes) -> Iterator[tuple[bytes, str]]:
    yield data, "data"


@pytest.mark.server
async def test_half_open_connections_are_replaced(postgres_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_module, "HEARTBEAT_INTERVAL_S", 0.2)
    monkeypatch.setattr(engine_module, "CLOSE_TIMEOUT_S", 0.5)
    url = make_url(postgres_database.url)
    assert url.port is not None
    async with (
        proxy(url.port, _whole) as proxy_,
        SqlTokenStore(url.render_as_string()) as other,
        asyncio.timeout(WAIT_S),
    ):
        store = SqlTokenStore(url.set(port=proxy_.port).render_as_string())
        await store.add([token("a")])
        changes = store.changes()
        assert await next_change(changes) == Resync()
        proxy_.stall()
        await other.add([token("b")])
        assert await next_change(changes) == Resync()
        with monkeypatch.context() as patched:  # a call on a new connection may take longer
            patched.setattr(sql_module, "CALL_TIMEOUT_S", 0.5)
            with pytest.raises(TimeoutError):
                await store.spend([token("a")], transaction="T")
        await store.spend([token("a")], transaction="T", outputs=[token("c")])
        assert await ids(store) == {"b", "c"}
        proxy_.stall()
        await store.close()


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    with tempfile.TemporaryDirectory() as folder:
        server = Postgres(Path(folder))
        server.make()
        server.start()
        yield server
        if server.process is not None:
            server.stop()


@pytest.mark.server
async def test_it_reconnects_to_a_restarted_server(own_server: Postgres) -> None:
    async with SqlTokenStore(own_server.new_database()) as store:
        changes = store.changes()
        assert await next_change(changes) == Resync()
        await asyncio.to_thread(own_server.stop)
        with pytest.raises((DBAPIError, OSError)):
            await store.add([token("a")])
        late = asyncio.ensure_future(anext(store.changes()))
        await asyncio.to_thread(own_server.start)
        assert await next_change(changes) == Resync()
        async with asyncio.timeout(WAIT_S):
            assert await late == Resync()
        await store.add([token("a")])
        assert await next_change(changes) == Added(token("a"))
    gc.collect()


@pytest.mark.server
async def test_schemas_of_one_database_are_independent(postgres_database: Database) -> None:
    user = make_url(postgres_database.url)
    for name in ("one", "two"):
        postgres_database.run(
            f"CREATE ROLE {user.database}_{name} LOGIN; CREATE SCHEMA AUTHORIZATION {user.database}_{name}"
        )
    urls = [user.set(username=f"{user.database}_{name}").render_as_string() for name in ("one", "two")]
    async with SqlTokenStore(urls[0]) as one, SqlTokenStore(urls[1]) as two:
        changes = one.changes()
        assert await next_change(changes) == Resync()
        await two.add([token("a")])
        await one.add([token("b")])
        assert await next_change(changes) == Added(token("b"))
        assert (await ids(one), await ids(two)) == ({"b"}, {"a"})


@pytest.mark.server
async def test_close_leaves_no_connection(postgres_database: Database) -> None:
    async with SqlTokenStore(postgres_database.url) as store:
        assert await next_change(store.changes()) == Resync()
        await asyncio.gather(*(store.add([token(f"{number}")]) for number in range(20)))
    async with asyncio.timeout(WAIT_S):  # the server ends a session when it reads that it was left
        while postgres_database.run(f"SELECT count(*) {OTHERS}") != "0":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_the_selector_for_threads_opens_and_closes_the_store(database: Database) -> None:
    def pay(number: int) -> int:
        try:
            selection = selector.select(
                3, owner="alice", token_type="Fiat", identifier="GBP", transaction=f"tx{number}"
            )
        except InsufficientFunds:
            return 0
        with selection:
            selection.spend([token(f"paid{number}", amount=3, owner="bob")])
            return 1

    async def issue() -> None:
        async with SqlTokenStore(database.url) as store:
            await store.add([token(f"t{number}") for number in range(60)])

    asyncio.run(issue())
    selector = InMemorySelector(SqlTokenStore(database.url), max_tokens=30)
    with selector, ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(pay, range(30), timeout=WAIT_S)) == 20
        paid = selector.select(60, owner="bob", token_type="Fiat", identifier="GBP", transaction="all")
        assert len(paid.tokens) == 20
    with pytest.raises(RuntimeError, match="closed"):
        paid.spend()
