"""`anyOf` on the wire: with sessions, restarts, and many who want the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from support.network.wire import Wire
from support.processes.servers import Genie, Redis

SESSION = "a secret that nobody guesses"


async def take(wire: Wire, *names: str, **payload: Any) -> dict[str, Any]:
    wire.send("request", anyOf=[f"exclusive:{name}" for name in names], **payload)
    id_ = (await wire.expect("queued"))["id"]
    command, told = await wire.receive()
    assert told["id"] == id_
    return {"command": command, **told}


async def test_many_who_choose_from_the_same_never_get_in_each_others_way(genie: Genie) -> None:
    names = [f"choose/{i}" for i in range(60)]
    wires = [await Wire.connect(genie.address) for _ in range(20)]
    told = await asyncio.gather(*(take(wire, *names, target=3) for wire in wires))
    assert [one["command"] for one in told] == ["locked"] * 20
    assert Counter(name for one in told for name in one["resources"]) == Counter(names)
    last = await take(wires[0], *names, target=1)
    assert (last["reason"], last["free"], last["locked"]) == ("insufficient", 0, 60)
    for wire, one in zip(wires, told, strict=True):
        assert await wire.release(one["id"]) == "success"


async def test_a_repeated_choice_is_the_same_request(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    first = await take(wire, "again/1", "again/2", target=1, ref="r")
    again = await take(wire, "again/1", "again/2", target=1, ref="r")
    assert again.pop("expiresIn") <= 10_000
    assert again == first
    wire.send("request", anyOf=["exclusive:again/2"], target=1, ref="r")
    assert (await wire.expect("error"))["code"] == "ref-conflict"
    wire.send("request", resources=["exclusive:again/1"], ref="r")
    assert (await wire.expect("error"))["code"] == "ref-conflict"
    await wire.release(first["id"])


async def test_what_was_taken_outlives_the_server(redis: Redis) -> None:
    redis.create_namespace()
    genie = Genie(redis)
    genie.start()
    try:
        wire = await Wire.connect(genie.address)
        wire.send("hello", session=SESSION)
        await wire.expect("welcome")
        first = await take(wire, "kept/1", "kept/2", "kept/3", weights=[1, 2, 3], target=3, ref="r")
        assert first["resources"] == ["kept/1", "kept/2"]
        genie.kill()
        genie.start()
        wire = await Wire.connect(genie.address)
        wire.send("hello", session=SESSION)
        assert (await wire.expect("welcome"))["resumed"]
        told = await wire.expect("locked")
        assert told.pop("expiresIn") <= 10_000
        assert told == {name: first[name] for name in ("id", "fence", "resources", "ref")}
        again = await take(wire, "kept/1", "kept/2", "kept/3", weights=[1, 2, 3], target=3, ref="r")
        assert again["fence"] == first["fence"]
        short = await take(wire, "kept/1", "kept/2", "kept/3", target=2)
        assert (short["reason"], short["free"], short["locked"]) == ("insufficient", 1, 2)
    finally:
        genie.kill()


async def test_ten_thousand_to_choose_from(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    large = 2**62 + 1
    taken = await take(wire, *(f"large/{i}" for i in range(10_000)), target=9_999)
    assert len(taken["resources"]) == 9_999
    short = await take(wire, *(f"large/{i}" for i in range(3)), weights=[large] * 3, target=large)
    assert (short["free"], short["locked"]) == (0, 3 * large)
    await wire.release(taken["id"])
    wire.send("request", anyOf=[f"exclusive:large/{i}" for i in range(10_001)], target=1)
    assert "1 to 10000" in (await wire.expect("error"))["message"]
