"""Locks of units and of subtrees over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.network.wire import Wire
from support.processes.servers import Genie, running_server


@pytest.fixture(name="genie", scope="module")
def _genie() -> Iterator[Genie]:
    with running_server() as server:
        yield server


async def inspect(wire: Wire, **filters: Any) -> dict[str, Any]:
    wire.send("inspect", **filters)
    return await wire.expect("inspected")


def listed(rows: list[dict[str, Any]]) -> list[tuple[int, list[str]]]:
    return [(row["id"], row["resources"]) for row in rows]


async def test_units_are_granted_while_they_fit_and_blockers_say_how_many(genie: Genie) -> None:
    a, b = await Wire.connect(genie.address), await Wire.connect(genie.address)
    two = await a.lock("2/3:pool")
    one = await b.lock("1/3:pool")
    late = await b.request("1/3:pool", transactionName="late")
    rows = await inspect(a, resource="pool")
    assert listed(rows["holders"]) == [(two, ["2/3:pool"]), (one, ["1/3:pool"])]
    assert listed(rows["queue"]) == [(late, ["1/3:pool"])]
    blockers = rows["queue"][0]["blockers"]
    assert [(row["id"], row["mode"], row["units"], row["of"]) for row in blockers] == [
        (two, "units", 2, 3),
        (one, "units", 1, 3),
    ]
    await a.release(two)
    assert (await b.expect("locked"))["id"] == late
    drain = await a.request("exclusive:pool")
    await b.release(one)
    await b.release(late)
    assert (await a.expect("locked"))["id"] == drain
    await a.release(drain)


async def test_repeated_units_are_added_up_and_invalid_ones_rejected(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    both = await wire.lock("1/3:sum", "1/3:sum")
    assert listed((await inspect(wire, id=both))["holders"]) == [(both, ["2/3:sum"])]
    await wire.release(both)
    for resources, part in (
        (["4/3:sum"], "not 4/3"),
        (["0/3:sum"], "not 0/3"),
        (["2/3:sum", "2/3:sum"], "4 units of 'sum' are requested in total, but at most 3 may be in use"),
        (["1/3:sum", "1/4:sum"], "limits of 3 and 4 units"),
        (["1/3:sum", "shared:sum"], "as units and in another mode"),
        (["1/3:sum/**"], "units of a subtree do not exist"),
        (["shared:" + "a/" * 17 + "**"], "at most 16 slashes, not 17"),
        ([f"shared:{number}/**" for number in range(17)], "at most 16 subtrees, not 17"),
        (["units:sum"], "'shared:', 'exclusive:' or units such as '2/10:', not 'units'"),
    ):
        wire.send("request", resources=resources)
        error = await wire.expect("error")
        assert error["code"] == "bad-request", resources
        assert part in error["message"], resources


async def test_a_subtree_and_the_names_below_it_exclude_each_other_in_turn(genie: Genie) -> None:
    a, b, c = [await Wire.connect(genie.address) for _ in range(3)]
    name = await a.lock("exclusive:accounts/2")
    subtree = await b.request("exclusive:accounts/**")
    later = await c.request("shared:accounts/3")
    beside = await c.lock("exclusive:accounts")
    rows = await inspect(a, resource="accounts/**")
    assert listed(rows["holders"]) == [(name, ["exclusive:accounts/2"])]
    assert listed(rows["queue"]) == [(subtree, ["exclusive:accounts/**"]), (later, ["shared:accounts/3"])]
    first, second = (row["blockers"] for row in rows["queue"])
    assert [(row["id"], row["resource"], row["mode"], row["state"]) for row in first] == [
        (name, "accounts/2", "exclusive", "held")
    ]
    assert [(row["id"], row["resource"], row["mode"], row["state"]) for row in second] == [
        (subtree, "accounts/**", "exclusive", "queued")
    ]
    await a.release(name)
    assert (await b.expect("locked"))["id"] == subtree
    await b.close()
    wire_rows = await inspect(a, id=subtree)
    assert listed(wire_rows["holders"]) == [(subtree, ["exclusive:accounts/**"])]
    await a.release(subtree)
    assert (await c.expect("locked"))["id"] == later
    # The subtree is not in the table now: what is below it is found all the same.
    assert listed((await inspect(a, resource="accounts/**"))["holders"]) == [(later, ["shared:accounts/3"])]
    assert (await inspect(a, resource="account/**"))["holdersTotal"] == 0
    assert (await inspect(a, resource="**"))["holdersTotal"] == 2
    for id_ in (later, beside):
        await c.release(id_)


async def test_inspect_of_a_name_shows_the_requests_for_subtrees_that_contain_it(genie: Genie) -> None:
    a, b = await Wire.connect(genie.address), await Wire.connect(genie.address)
    books = await a.lock("exclusive:i/**", transactionName="books")
    waiting = [await b.request(lock) for lock in ("exclusive:i/2", "exclusive:i/**", "1/2:i/3", "shared:i/2/x")]
    for name, holders, queue in (
        ("i/2", [books], waiting[:2]),
        ("i/3", [books], waiting[1:3]),
        ("i/2/**", [books], [waiting[1], waiting[3]]),
        ("i/**", [books], waiting),
        ("i", [], []),
    ):
        reply = await inspect(b, resource=name)
        assert [row["id"] for row in reply["holders"]] == holders, name
        assert [row["id"] for row in reply["queue"]] == queue, name
        assert (reply["holdersTotal"], reply["queueTotal"]) == (len(holders), len(queue)), name
    for filters in {"transactionName": "books"}, {"id": books}:
        reply = await inspect(b, resource="i/2", **filters)
        assert listed(reply["holders"]) == [(books, ["exclusive:i/**"])]
        assert reply["queue"] == []
    for id_ in reversed(waiting):
        b.send("release", id=id_)
        await b.expect("released")
    await a.release(books)


async def test_inspect_of_a_subtree_with_an_id_or_a_transaction(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    inside = await wire.lock("exclusive:t/1", transactionName="both")
    outside = await wire.lock("exclusive:u/1", transactionName="both")
    for filters, ids in (
        ({"transactionName": "both", "resource": "t/**"}, [inside]),
        ({"transactionName": "both", "resource": "**"}, [inside, outside]),
        ({"id": inside, "resource": "t/**"}, [inside]),
        ({"id": outside, "resource": "t/**"}, []),
        ({"id": outside, "resource": "**"}, [outside]),
    ):
        assert [row["id"] for row in (await inspect(wire, **filters))["holders"]] == ids, filters
    await wire.release(inside)
    await wire.release(outside)


async def test_the_watchers_above_and_below_a_subtree_get_its_events_once(genie: Genie) -> None:
    holder = await Wire.connect(genie.address)
    watched = {"": 1, "w/": 1, "w/1/": 1, "w/1/x": 1, "w": 1, "w/**": 1, "v/": 0, "w/2 w/3": 1}
    wires: dict[str, Wire] = {}
    for prefixes in watched:
        wires[prefixes] = await Wire.connect(genie.address)
        for prefix in prefixes.split(" "):
            wires[prefixes].send("watch", prefix=prefix)
            await wires[prefixes].expect("watching")
    id_ = await holder.lock("exclusive:w/**")
    late = await Wire.connect(genie.address)
    late.send("watch", prefix="w/1/")
    assert (await late.expect("watching"))["held"] == [{"resource": "w/**", "mode": "exclusive", "id": id_}]
    await holder.release(id_)
    units = await holder.lock("2/3:w/1/x")
    for prefixes, count in watched.items():
        wire = wires[prefixes]
        for state in ("locked", "unlocked") if count else ():
            event = await wire.expect("event")
            assert event == {"state": state, "resource": "w/**", "mode": "exclusive", "id": id_}, prefixes
        if prefixes in ("", "w/", "w", "w/1/", "w/1/x"):
            event = await wire.expect("event")
            assert event == {"state": "locked", "resource": "w/1/x", "mode": "units", "id": units, "units": 2, "of": 3}
        wire.send("ping")
        await wire.expect("pong")
    await holder.release(units)


TOKENS = """
[all]
token = "0123456789abcdef-all"
[books]
token = "0123456789abcdef-books"
prefixes = ["accounts/", "limits/*", "stock/1/"]
"""


async def test_a_principal_locks_and_inspects_only_subtrees_within_its_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(TOKENS)
    with running_server(token_file=str(file)) as server:
        books, everything = await Wire.connect(server.address), await Wire.connect(server.address)
        for wire, name in (books, "books"), (everything, "all"):
            wire.send("hello", token=f"0123456789abcdef-{name}")
            await wire.expect("welcome")
        for name in ("accounts/**", "accounts/2/**", "stock/1/**"):
            await books.release(await books.lock(f"exclusive:{name}"))
            await inspect(books, resource=name)
        for name in ("**", "limits/**", "stock/**", "accountsx/**"):
            books.send("request", resources=[f"shared:{name}"])
            error = await books.expect("error")
            assert error["code"] == "unauthorized"
            assert repr(name) in error["message"]
            books.send("inspect", resource=name)
            assert (await books.expect("error"))["code"] == "unauthorized"
        # A subtree that contains its names is a blocker that it may see; one that contains none is not.
        await everything.lock("exclusive:stock/**", "exclusive:limits/**", "exclusive:other/**")
        await books.request("exclusive:stock/1/x", "exclusive:accounts/1")
        await everything.request("shared:accounts/1", "shared:other/1")
        first, second = (await inspect(books, resource="accounts/1"))["queue"]
        assert [row["resource"] for row in first["blockers"]] == ["stock/**"]
        assert [row["resource"] for row in second["blockers"]] == ["accounts/1"]
        assert second["blockersTotal"] == 2
        # The principal sees the subtrees that contain its names, and the number of the others.
        (holder,) = (await inspect(books, resource="stock/1/x"))["holders"]
        assert (holder["resources"], holder["resourcesTotal"]) == (["exclusive:stock/**", "exclusive:limits/**"], 3)


async def test_a_retry_with_other_units_is_rejected(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", session="secret-of-the-pool")
    await wire.expect("welcome")
    for ref, resource, other in ("u", "2/3:retry", "1/3:retry"), ("s", "exclusive:r/**", "shared:r/**"):
        id_ = await wire.lock(resource, ref=ref)
        wire.send("request", resources=[resource], ref=ref)
        assert (await wire.expect("queued"))["id"] == id_
        assert (await wire.expect("locked"))["id"] == id_
        for state in ("held", "ended"):
            if state == "ended":
                await wire.release(id_)
            wire.send("request", resources=[other], ref=ref)
            assert (await wire.expect("error"))["code"] == "ref-conflict", state
        wire.send("request", resources=[resource], ref=ref)
        assert (await wire.expect("queued"))["id"] == id_
        assert (await wire.expect("released"))["id"] == id_
    wire.send("bye")
    await wire.expect("bye")


async def test_a_resumed_session_keeps_its_units_and_its_subtree_and_an_ended_one_releases_them(genie: Genie) -> None:
    first, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    first.send("hello", session="secret-of-the-session")
    await first.expect("welcome")
    units = await first.lock("3/3:resumed", onDisconnect="release")
    subtree = await first.lock("exclusive:resumed/**", onDisconnect="release")
    waiting = await other.request("1/3:resumed", "shared:resumed/1")
    await first.close()
    second = await Wire.connect(genie.address)
    second.send("hello", session="secret-of-the-session")
    assert (await second.expect("welcome"))["resumed"]
    assert [(await second.expect("locked"))["id"] for _ in range(2)] == [units, subtree]
    second.send("bye")
    assert (await other.expect("locked"))["id"] == waiting
    await other.release(waiting)


async def test_a_lost_connection_releases_its_units_and_leaves_the_queue_of_a_subtree(genie: Genie) -> None:
    holder, lost, other = [await Wire.connect(genie.address) for _ in range(3)]
    name = await holder.lock("exclusive:lost/1")
    await lost.lock("1/1:lost", onDisconnect="release")
    await lost.request("exclusive:lost/**", onDisconnect="release")
    units = await other.request("1/1:lost")
    below = await other.request("exclusive:lost/2")
    await lost.close()
    assert {(await other.expect("locked"))["id"] for _ in range(2)} == {units, below}
    for wire, id_ in (holder, name), (other, units), (other, below):
        await wire.release(id_)


async def test_a_deadlock_says_the_units_that_are_waited_for(genie: Genie) -> None:
    a, b = await Wire.connect(genie.address), await Wire.connect(genie.address)
    held = [await a.lock("2/3:dead", transactionName="A"), await b.lock("exclusive:dead/1", transactionName="B")]
    a_waits = await a.request("exclusive:dead/**", transactionName="A")
    b_waits = await b.request("2/3:dead", transactionName="B")
    ended = await b.expect("released")
    assert (ended["id"], ended["reason"], ended["cycle"]) == (b_waits, "deadlock", ["B", "A"])
    assert ended["waits"] == [
        {"resource": "dead", "waiter": b_waits, "holder": held[0], "units": 2, "of": 3},
        {"resource": "dead/1", "waiter": a_waits, "holder": held[1]},
    ]
    await b.release(held[1])
    assert (await a.expect("locked"))["id"] == a_waits
    await a.release(a_waits)
    await a.release(held[0])


async def test_any_of_takes_units_that_fit_at_once(genie: Genie) -> None:
    wire, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    full = await other.lock("2/2:choice/1")
    wire.send("request", anyOf=["1/2:choice/1", "1/2:choice/2", "shared:choice/3"], target=2)
    id_ = (await wire.expect("queued"))["id"]
    assert sorted((await wire.expect("locked"))["resources"]) == ["choice/2", "choice/3"]
    rows = (await inspect(other, id=id_))["holders"]
    assert sorted(rows[0]["resources"]) == ["1/2:choice/2", "shared:choice/3"]
    wire.send("request", anyOf=["1/2:choice/1", "2/2:choice/2"], target=2)
    await wire.expect("queued")
    ended = await wire.expect("released")
    assert (ended["reason"], ended["free"], ended["locked"]) == ("insufficient", 0, 2)
    wire.send("request", anyOf=["exclusive:choice/**"], target=1)
    assert "must not name a subtree" in (await wire.expect("error"))["message"]
    await wire.release(id_)
    await other.release(full)


async def test_any_of_counts_the_units_beside_an_exclusive_lock_of_the_same_transaction(genie: Genie) -> None:
    wire, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    held = [await wire.lock(lock, transactionName="own") for lock in ("exclusive:own", "2/3:own")]
    wire.send("request", anyOf=["1/2:own"], target=1, transactionName="own")
    await wire.expect("queued")
    assert (await wire.expect("released"))["reason"] == "insufficient", "three units would be in use, of at most two"
    wire.send("request", anyOf=["1/3:own"], target=1, transactionName="own")
    held.append((await wire.expect("queued"))["id"])
    await wire.expect("locked")
    for id_ in held:
        await wire.release(id_)
    await other.release(await other.lock("3/3:own"))
