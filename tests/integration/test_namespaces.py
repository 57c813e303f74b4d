"""What a connection is for, said on the bare wire to a server with one namespace."""

from __future__ import annotations

from typing import Any

import pytest

from servers import Genie, running_server
from wire import Wire

SPANS = (
    "namespace must be 'genie', which this connection is for, not 'billing': a request can't span namespaces, "
    "since deadlocks between them would not be found; use one connection for each"
)


async def refused(wire: Wire, code: str) -> dict[str, Any]:
    payload = await wire.expect("error")
    assert payload.pop("code") == code
    return payload


async def test_commands_that_say_the_namespace_of_their_connection_are_carried_out(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", namespace="genie")
    assert (await wire.expect("welcome"))["namespace"] == "genie"
    within = {"namespace": "genie"}
    wire.send("watch", prefix="said/", **within)
    assert (await wire.expect("watching"))["held"] == []
    wire.send("request", resources=["exclusive:said/1"], ref="r1", **within)
    wire.send("request", resources=["exclusive:said/1"], ref="r1")
    id_ = (await wire.expect("queued"))["id"]
    fence = (await wire.expect("locked"))["fence"]
    assert (await wire.expect("event"))["id"] == id_
    assert (await wire.expect("queued"))["id"] == id_, "it is the same request without the field"
    assert (await wire.expect("locked"))["fence"] == fence
    wire.send("extend", id=id_, transactionTimeout=5000, **within)
    assert (await wire.expect("extended"))["id"] == id_
    wire.send("inspect", id=id_, **within)
    assert (await wire.expect("inspected"))["holdersTotal"] == 1
    wire.send("unwatch", prefix="said/", **within)
    await wire.expect("unwatched")
    wire.send("release", id=id_, **within)
    assert (await wire.expect("released"))["reason"] == "success"
    wire.send("request", anyOf=["exclusive:said/1"], target=1, **within)
    await wire.expect("queued")
    assert (await wire.expect("locked"))["resources"] == ["said/1"]


async def test_commands_that_say_another_are_refused_and_change_nothing(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    id_ = await wire.lock("exclusive:spans/1")
    within = {"namespace": "billing"}
    wire.send("request", resources=["exclusive:spans/2"], ref="r1", **within)
    assert await refused(wire, "bad-request") == {"message": f"request: {SPANS}", "ref": "r1"}
    wire.send("request", anyOf=["exclusive:spans/2"], target=1, ref="r2", **within)
    assert await refused(wire, "bad-request") == {"message": f"request: {SPANS}", "ref": "r2"}
    for command, payload in (("release", {}), ("extend", {"transactionTimeout": 1})):
        wire.send(command, id=id_, **payload, **within)
        assert await refused(wire, "bad-request") == {"message": f"{command}: {SPANS}", "id": id_}
    wire.send("inspect", **within)
    assert await refused(wire, "bad-request") == {"message": f"inspect: {SPANS}"}
    for command in ("watch", "unwatch"):
        wire.send(command, prefix="", **within)
        assert await refused(wire, "bad-request") == {"message": f"{command}: {SPANS}"}
    wire.send("inspect", resource="spans/1")
    assert (await wire.expect("inspected"))["holders"][0]["id"] == id_
    assert await wire.release(id_) == "success"


async def test_what_follows_a_hello_for_another_namespace_is_not_carried_out_in_this_one(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", session="a-secret-of-namespaces", namespace="billing")
    wire.send("request", resources=["exclusive:elsewhere"], ref="r1")
    wire.send("request", resources=["exclusive:elsewhere"], namespace="billing", ref="r2")
    assert await refused(wire, "unknown-namespace") == {
        "message": "this server does not serve the namespace 'billing'; it serves genie"
    }
    for ref in ("r1", "r2"):
        assert await refused(wire, "unavailable") == {
            "message": "hello was rejected; send another hello first",
            "ref": ref,
        }
    wire.send("hello", session="a-secret-of-namespaces")
    welcome = await wire.expect("welcome")
    assert (welcome["namespace"], welcome["resumed"]) == ("genie", False)
    wire.send("inspect", resource="elsewhere")
    assert (await wire.expect("inspected"))["holdersTotal"] == 0


async def test_requests_of_a_turn_are_counted_with_their_namespace_said_or_not() -> None:
    with running_server(max_requests_per_connection=4) as server:
        wire = await Wire.connect(server.address)
        line = b'{"command":"request","payload":{"resources":["exclusive:a%d"]%s}}\n'
        wire.raw(b"".join(line % (i, b',"namespace":"genie"' if i % 2 else b"") for i in range(6)))
        for _ in range(4):
            await wire.expect("queued")
            await wire.expect("locked")
        for _ in range(2):
            await refused(wire, "too-many")


@pytest.mark.parametrize(("command", "may"), [("request", "inspect"), ("inspect", "lock")])
async def test_rights_are_asked_of_what_is_within(command: str, may: str, tmp_path: Any) -> None:
    path = tmp_path / "tokens"
    path.write_text(f'[somebody]\ntoken = "a-token-of-namespaces"\nmay = ["{may}"]\n')
    path.chmod(0o600)
    with running_server(token_file=path) as server:
        wire = await Wire.connect(server.address)
        wire.send("hello", token="a-token-of-namespaces", namespace="genie")
        await wire.expect("welcome")
        payload = {"resources": ["exclusive:a"]} if command == "request" else {}
        for namespace in ("genie", "billing"):
            wire.send(command, **payload, namespace=namespace)
            assert "this requires the permission" in (await refused(wire, "unauthorized"))["message"]


async def test_behind_a_wrong_hello_nothing_is_carried_out_until_it_is_right(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", namespace="no such thing!")
    wire.raw(b"{nonsense\n")
    wire.send("request", resources=["exclusive:behind"], ref="r")
    assert "namespace must be" in (await refused(wire, "bad-request"))["message"]
    await refused(wire, "bad-json")
    assert (await refused(wire, "unavailable"))["ref"] == "r"
    wire.send("hello", namespace="genie")
    await wire.expect("welcome")
    wire.send("inspect", resource="behind")
    assert (await wire.expect("inspected"))["holdersTotal"] == 0
