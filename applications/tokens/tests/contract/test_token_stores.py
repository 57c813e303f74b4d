"""The contract of token stores: in memory, SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from genie_tokens.errors import InsufficientFunds, SpentAlready
from genie_tokens.in_memory.selector import InMemorySelector
from genie_tokens.store import Added, Change, Resync, Spent
from genie_tokens.stores import change_feed
from genie_tokens.stores.memory import MemoryTokenStore
from genie_tokens.stores.sql import SqlTokenStore
from genie_tokens.token import MAX_AMOUNT, MAX_ID
from support.databases.postgres import postgres
from support.processes.servers import WAIT_S
from tokens_made import ids, read, token

Store = MemoryTokenStore | SqlTokenStore
Make = Callable[[], Store]
WALLET = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes a store of the same tokens each time; in memory it is the same one."""
    made: list[Store] = []
    if request.param == "memory":
        made.append(MemoryTokenStore())
    url = postgres().new_database() if request.param == "postgres" else f"sqlite+aiosqlite:///{tmp_path}/tokens.db"

    def build() -> Store:
        if request.param != "memory":
            made.append(SqlTokenStore(url))
        return made[-1]

    yield build
    for store in made:
        await store.close()
    gc.collect()


@pytest.fixture
def store(make: Make) -> Store:
    return make()


async def next_changes(changes: AsyncIterator[Change], count: int) -> list[Change]:
    async with asyncio.timeout(WAIT_S):
        return [await anext(changes) for _ in range(count)]


async def test_a_token_is_read_as_it_was_written(store: Store) -> None:
    plain = token("plain")
    full = token(
        "tx/7:0 ü€\U0001f600",
        owner="key'1\\",
        amount=MAX_AMOUNT,
        account="acme",
        issuer="bank",
        notary="n",
        metadata={"a": [1, None, {"ü": "\n"}], "b": 2.5},
    )
    await store.add([plain, full])
    assert await store.get(["plain", full.id, "other"]) == {"plain": plain, full.id: full}
    assert [page async for page in store.unspent(owner="key'1\\")] == [[full]]
    assert await store.get([]) == {}


async def test_a_wallet_is_read_by_owner_by_account_and_by_kind(store: Store) -> None:
    await store.add(
        [
            token("a"),
            token("b", account="acme"),
            token("c", owner="bob", account="acme"),
            token("d", owner="bob", identifier="EUR", account="acme"),
            token("e", token_type="Bond", account="other"),
        ]
    )
    assert await ids(store) == set("abcde")
    assert await ids(store, **WALLET) == set("ab")
    assert await ids(store, account="acme", token_type="Fiat", identifier="GBP") == set("bc")
    assert await ids(store, owner="bob") == set("cd")
    assert await ids(store, account="acme") == set("bcd")
    assert await ids(store, token_type="Fiat") == set("abcd")
    assert await ids(store, identifier="GBP") == set("abce")
    assert await ids(store, owner="bob", account="acme", token_type="Fiat", identifier="GBP") == {"c"}
    assert await ids(store, owner="alice", account="acme") == {"b"}
    assert await ids(store, owner="nobody", token_type="Fiat", identifier="GBP") == set()


async def test_an_id_can_be_issued_only_once(store: Store) -> None:
    await store.add([token("a"), token("b")])
    await store.spend([token("b")], transaction="T")
    for there in "ab":
        with pytest.raises(ValueError, match=f"exist already: '{there}'"):
            await store.add([token("new"), token(there)])
    with pytest.raises(ValueError, match="listed more than once: 'new'"):
        await store.add([token("new"), token("new", amount=2)])
    await store.add([])
    assert await ids(store) == {"a"}


async def test_spending_removes_tokens_and_issues_others(store: Store) -> None:
    await store.add([token("a", amount=3), token("b", amount=4, account="acme"), token("c")])
    change = token("d", amount=2, account="acme")
    await store.spend([token("a"), token("b")], transaction="T", outputs=[token("e", owner="bob"), change])
    assert await ids(store) == set("cde")
    assert await ids(store, **WALLET) == set("cd")
    assert await ids(store, account="acme") == {"d"}
    assert await store.get(["a", "d"]) == {"d": change}


async def test_a_token_spent_by_another_transaction_is_rejected(store: Store) -> None:
    await store.add([token(id) for id in "abc"])
    await store.spend([token("b")], transaction="first")
    with pytest.raises(SpentAlready) as refused:
        await store.spend([token("c"), token("b"), token("never")], transaction="second", outputs=[token("d")])
    assert sorted(refused.value.ids) == ["b", "never"]
    assert await ids(store) == set("ac"), "nothing was changed"


async def test_a_spend_is_idempotent_for_its_transaction(store: Store) -> None:
    await store.add([token(id) for id in "abc"])
    for _ in range(3):
        await store.spend([token("a"), token("b")], transaction="T", outputs=[token("d")])
    await store.spend([token("d")], transaction="next")
    await store.spend([token("b"), token("a")], transaction="T", outputs=[token("d")])
    assert await ids(store) == {"c"}
    with pytest.raises(SpentAlready):
        await store.spend([token("a"), token("b")], transaction="other", outputs=[token("d")])


async def test_a_repeated_spend_with_other_arguments_is_rejected(store: Store) -> None:
    """To say something else is not to say it again: it would be told that outputs are there which are not."""
    await store.add([token(id) for id in "abc"])
    await store.spend([token("a")], transaction="T", outputs=[token("d")])
    with pytest.raises(SpentAlready) as refused:
        await store.spend([token("a"), token("b")], transaction="T", outputs=[token("e")])
    assert refused.value.ids == ("a",)
    with pytest.raises(ValueError, match="has spent these tokens before, without outputs 'e'"):
        await store.spend([token("a")], transaction="T", outputs=[token("d"), token("e")])
    assert await ids(store) == set("bcd")


async def test_invalid_spends_are_rejected(store: Store) -> None:
    await store.add([token("a"), token("b")])
    with pytest.raises(ValueError, match="exist already: 'b'"):
        await store.spend([token("a")], transaction="T", outputs=[token("c"), token("b")])
    with pytest.raises(ValueError, match="exist already: 'a'"):
        await store.spend([token("a")], transaction="T", outputs=[token("a")])
    with pytest.raises(ValueError, match="listed more than once: 'a'"):
        await store.spend([token("a"), token("a")], transaction="T")
    with pytest.raises(ValueError, match="listed more than once: 'c'"):
        await store.spend([token("a")], transaction="T", outputs=[token("c"), token("c")])
    with pytest.raises(ValueError, match="at least one token to spend"):
        await store.spend([], transaction="T", outputs=[token("c")])
    assert await ids(store) == set("ab")


async def test_one_of_fifty_concurrent_spends_of_a_token_succeeds(make: Make) -> None:
    stores = [make(), make()]
    await stores[0].add([token("a")])

    async def spend(number: int) -> str | None:
        try:
            await stores[number % 2].spend([token("a")], transaction=f"T{number}", outputs=[token(f"out{number}")])
        except SpentAlready:
            return None
        return f"out{number}"

    outcomes = await asyncio.gather(*map(spend, range(50)))
    assert await ids(stores[1]) == {out for out in outcomes if out}
    assert len([out for out in outcomes if out]) == 1


async def test_one_of_twenty_concurrent_issues_of_the_same_ids_succeeds(make: Make) -> None:
    stores, chance = [make(), make()], random.Random(5)  # noqa: S311

    async def add(number: int) -> str | None:
        names = chance.sample("abcdefghij", 10)
        try:
            await stores[number % 2].add([token(name, owner=f"{number}") for name in names])
        except ValueError:
            return None
        return f"{number}"

    async with asyncio.timeout(WAIT_S):
        (owner,) = [done for done in await asyncio.gather(*map(add, range(20))) if done]
    assert await ids(stores[0]) == await ids(stores[1], owner=owner) == set("abcdefghij")


async def test_overlapping_spends_never_deadlock(make: Make) -> None:
    """Each names its tokens in an order of its own."""
    stores, chance = [make(), make()], random.Random(7)  # noqa: S311
    names = [f"{number}" for number in range(30)]
    await stores[0].add([token(name) for name in names])
    done: dict[str, list[str]] = {}

    async def spend(number: int) -> None:
        asked = chance.sample(names, 4)
        outputs = [token(f"out{number}.{part}") for part in chance.sample(range(9), 3)]
        try:
            await stores[number % 2].spend([token(name) for name in asked], transaction=f"T{number}", outputs=outputs)
        except SpentAlready:
            assert not await stores[0].get([output.id for output in outputs])
        else:
            done[f"T{number}"] = asked

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*map(spend, range(40)))
    spent = [name for asked in done.values() for name in asked]
    assert len(spent) == len(set(spent)), "spent twice"
    assert await ids(stores[1]) & set(names) == set(names) - set(spent)


async def test_paging_returns_each_unchanged_token_once_during_changes(make: Make) -> None:
    store, other = make(), make()
    stay = [f"stay{number:05}" for number in range(4_000)]
    leave = [f"{letter}leave{number:03}" for letter in "az" for number in range(400)]
    everything = [token(id) for id in stay + leave]
    random.Random(3).shuffle(everything)  # noqa: S311
    await store.add(everything)
    found: list[str] = []
    turn = 0
    async for page in store.unspent(**WALLET):
        assert len(page) <= 1_000
        found += [each.id for each in page]
        async with asyncio.timeout(WAIT_S):  # an open walk is in nobody's way
            spent = [token(id) for id in leave[turn::8]]
            new = [token(f"{letter}new{turn}") for letter in "0az"]
            await other.spend(spent, transaction=f"T{turn}", outputs=new)
        turn += 1
    assert turn >= 4
    assert len(found) == len(set(found)), "told twice"
    assert set(found) >= set(stay)
    assert set(found) <= set(stay) | set(leave) | {f"{letter}new{number}" for letter in "0az" for number in range(8)}


async def test_more_tokens_than_a_statement_has_parameters(store: Store) -> None:
    many = [token(f"{number}") for number in range(33_000)]
    await store.add(many)
    assert len(await store.get([each.id for each in many])) == 33_000
    assert len(await read(store.unspent(**WALLET))) == 33_000
    await store.spend(many, transaction="T", outputs=[token("sum", amount=33_000)])
    await store.spend(many, transaction="T", outputs=[token("sum", amount=33_000)])
    assert await ids(store) == {"sum"}


async def test_all_readers_receive_changes_in_order(make: Make) -> None:
    store, other = make(), make()
    await store.add([token("before")])
    one, two = store.changes(), other.changes()
    assert await next_changes(one, 1) == await next_changes(two, 1) == [Resync()]
    await other.add([token("a", metadata={"b": [1]}), token("b")])
    await store.spend([token("before")], transaction="T", outputs=[token("c", account="acme")])
    await other.add([token("d")])
    expected = [
        Added(token("a", metadata={"b": [1]})),
        Added(token("b")),
        Spent("before"),
        Added(token("c", account="acme")),
        Added(token("d")),
    ]
    for changes in (one, two):
        assert await next_changes(changes, 5) == expected
    three = store.changes()
    assert await next_changes(three, 1) == [Resync()]
    await store.add([token("e")])
    for changes in (one, two, three):
        while (change := (await next_changes(changes, 1))[0]) != Added(token("e")):
            assert changes is three, "one that joins may be told what was shortly before"
            assert change in expected


async def test_the_longest_ids_are_received(store: Store) -> None:
    changes = store.changes()
    assert await next_changes(changes, 1) == [Resync()]
    many = [token(f"{number:03}" + "\U0001f600" * (MAX_ID - 3)) for number in range(50)]
    await store.add(many)
    assert await next_changes(changes, 50) == [Added(each) for each in many]
    await store.spend(many, transaction="T")
    assert await next_changes(changes, 50) == [Spent(each.id) for each in many]


async def test_failed_changes_are_not_published(store: Store) -> None:
    changes = store.changes()
    assert await next_changes(changes, 1) == [Resync()]
    await store.add([token("a"), token("b")])
    await store.spend([token("a")], transaction="T")
    with pytest.raises(SpentAlready):
        await store.spend([token("b"), token("a")], transaction="U", outputs=[token("c")])
    with pytest.raises(ValueError, match="exist already"):
        await store.add([token("c"), token("b")])
    await store.spend([token("a")], transaction="T")
    await store.add([token("last")])
    seen: list[Change] = []
    while not seen or seen[-1] != Added(token("last")):
        seen += await next_changes(changes, 1)
    assert seen[-3:] == [Added(token("b")), Spent("a"), Added(token("last"))]
    assert seen[:-3] in ([], [Added(token("a"))]), "who hears of it late is not told of what is spent by then"


async def test_a_slow_reader_gets_a_resync(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_feed, "MAX_UNREAD_CHANGES", 10)
    slow = store.changes()
    assert await next_changes(slow, 1) == [Resync()]
    await store.add([token(f"{number}") for number in range(50)])
    assert await next_changes(slow, 1) == [Resync()]
    await store.add([token("a")])
    assert await next_changes(slow, 1) == [Added(token("a"))]


async def test_a_cancelled_reader_can_continue(store: Store) -> None:
    changes = store.changes()
    assert await next_changes(changes, 1) == [Resync()]
    for _ in range(3):
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
    await store.add([token("a")])
    assert await next_changes(changes, 1) == [Added(token("a"))]


async def test_close_ends_the_readers_of_changes(store: Store) -> None:
    waiting, fresh = store.changes(), store.changes()
    assert await next_changes(waiting, 1) == [Resync()]
    reader = asyncio.ensure_future(anext(waiting, None))
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(WAIT_S):
        assert await reader is None
        assert [change async for change in fresh] == []
        assert [change async for change in store.changes()] == []
    await store.close()


async def test_a_cancelled_spend_is_atomic(make: Make) -> None:
    store = make()
    rounds = 60
    await store.add([token(f"{number}{part}") for number in range(rounds) for part in "ab"])

    def spend(number: int) -> asyncio.Future[None]:
        both = [token(f"{number}{part}") for part in "ab"]
        return asyncio.ensure_future(store.spend(both, transaction=f"T{number}", outputs=[token(f"{number}c")]))

    for number in range(rounds):
        task = spend(number)
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        reading = asyncio.ensure_future(ids(store))
        for _ in range(number):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({task, reading})
        there = await store.get([f"{number}{part}" for part in "abc"])
        assert there.keys() in ({f"{number}a", f"{number}b"}, {f"{number}c"})
    for number in range(rounds):
        await spend(number)
    assert await ids(store) == {f"{number}c" for number in range(rounds)}


async def test_it_is_a_context_manager(make: Make) -> None:
    async with make() as store:
        await store.add([token("a")])
        changes = store.changes()
    assert [change async for change in changes] == []


async def test_a_selector_sees_added_tokens_at_once(store: Store) -> None:
    """Without waiting for the change feed, and each time: no other task runs between `add` and `select`."""
    async with InMemorySelector(store) as selector:
        for number in range(20):
            await store.add([token(f"added {number}", amount=5)])
            selection = await selector.select(5, **WALLET, transaction=f"{number}")
            assert [each.id for each in selection.tokens] == [f"added {number}"]
            await selection.spend()


async def test_tokens_that_could_not_be_added_are_not_selected(store: Store) -> None:
    async with InMemorySelector(store) as selector:
        await store.add([token("there", amount=5)])
        with pytest.raises(ValueError, match="there"):
            await store.add([token("new", amount=5), token("there", amount=5)])
        with pytest.raises(InsufficientFunds, match="5"):
            await selector.select(10, **WALLET, transaction="t")
