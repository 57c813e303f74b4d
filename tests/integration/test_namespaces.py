"""The namespace of a connection and of its commands, on a server with one namespace."""

from __future__ import annotations

from typing import Any

import pytest

from support.network.wire import Wire
from support.processes.servers import Genie, running_server

WRONG_NAMESPACE = (
    "namespace must be 'genie', the namespace of this connection, not 'billing': requests cannot span namespaces, "
    "because deadlocks between them are not detected; use one connection for each namespace"
)


async def expect_error(wire: Wire, code: str) -> dict[str, Any]:
    payload = await wire.expect("error")
    assert payload.pop("code") == code
    return payload


async def test_commands_with_the_namespace_of_their_connection_are_executed(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", namespace="genie")
    assert (await wire.expect("welcome"))["namespace"] == "genie"
    namespace = {"namespace": "genie"}
    wire.send("watch", prefix="named/", **namespace)
    assert (await wire.expect("watching"))["held"] == []
    wire.send("request", resources=["exclusive:named/1"], ref="r1", **namespace)
    wire.send("request", resources=["exclusive:named/1"], ref="r1")
    id_ = (await wire.expect("queued"))["id"]
    fence = (await wire.expect("locked"))["fence"]
    assert (await wire.expect("event"))["id"] == id_
    assert (await wire.expect("queued"))["id"] == id_, "without the field it is the same request"
    assert (await wire.expect("locked"))["fence"] == fence
    wire.send("extend", id=id_, transactionTimeout=5000, **namespace)
    assert (await wire.expect("extended"))["id"] == id_
    wire.send("inspect", id=id_, **namespace)
    assert (await wire.expect("inspected"))["holdersTotal"] == 1
    wire.send("unwatch", prefix="named/", **namespace)
    await wire.expect("unwatched")
    wire.send("release", id=id_, **namespace)
    assert (await wire.expect("released"))["reason"] == "success"
    wire.send("request", anyOf=["exclusive:named/1"], target=1, **namespace)
    await wire.expect("queued")
    assert (await wire.expect("locked"))["resources"] == ["named/1"]


async def test_commands_with_another_namespace_are_rejected_and_change_nothing(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    id_ = await wire.lock("exclusive:spans/1")
    namespace = {"namespace": "billing"}
    wire.send("request", resources=["exclusive:spans/2"], ref="r1", **namespace)
    assert await expect_error(wire, "bad-request") == {"message": f"request: {WRONG_NAMESPACE}", "ref": "r1"}
    wire.send("request", anyOf=["exclusive:spans/2"], target=1, ref="r2", **namespace)
    assert await expect_error(wire, "bad-request") == {"message": f"request: {WRONG_NAMESPACE}", "ref": "r2"}
    for command, payload in (("release", {}), ("extend", {"transactionTimeout": 1})):
        wire.send(command, id=id_, **payload, **namespace)
        assert await expect_error(wire, "bad-request") == {"message": f"{command}: {WRONG_NAMESPACE}", "id": id_}
    wire.send("inspect", **namespace)
    assert await expect_error(wire, "bad-request") == {"message": f"inspect: {WRONG_NAMESPACE}"}
    for command in ("watch", "unwatch"):
        wire.send(command, prefix="", **namespace)
        assert await expect_error(wire, "bad-request") == {"message": f"{command}: {WRONG_NAMESPACE}"}
    wire.send("inspect", resource="spans/1")
    assert (await wire.expect("inspected"))["holders"][0]["id"] == id_
    assert await wire.release(id_) == "success"


async def test_commands_after_a_hello_for_an_unknown_namespace_are_not_executed(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", session="a-secret-of-namespaces", namespace="billing")
    wire.send("request", resources=["exclusive:unserved"], ref="r1")
    wire.send("request", resources=["exclusive:unserved"], namespace="billing", ref="r2")
    assert await expect_error(wire, "unknown-namespace") == {
        "message": "this server does not serve the namespace 'billing'; it serves genie"
    }
    for ref in ("r1", "r2"):
        assert await expect_error(wire, "unavailable") == {
            "message": "hello was rejected; send another hello first",
            "ref": ref,
        }
    wire.send("hello", session="a-secret-of-namespaces")
    welcome = await wire.expect("welcome")
    assert (welcome["namespace"], welcome["resumed"]) == ("genie", False)
    wire.send("inspect", resource="unserved")
    assert (await wire.expect("inspected"))["holdersTotal"] == 0


async def test_requests_with_and_without_a_namespace_count_for_the_limit() -> None:
    with running_server(max_requests_per_connection=4) as server:
        wire = await Wire.connect(server.address)
        line = b'{"command":"request","payload":{"resources":["exclusive:a%d"]%s}}\n'
        wire.raw(b"".join(line % (i, b',"namespace":"genie"' if i % 2 else b"") for i in range(6)))
        for _ in range(4):
            await wire.expect("queued")
            await wire.expect("locked")
        for _ in range(2):
            await expect_error(wire, "too-many")


@pytest.mark.parametrize(("command", "permission"), [("request", "inspect"), ("inspect", "lock")])
async def test_commands_with_a_namespace_require_the_permission_of_the_command(
    command: str, permission: str, tmp_path: Any
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f'[service]\ntoken = "a-token-of-namespaces"\nmay = ["{permission}"]\n')
    path.chmod(0o600)
    with running_server(token_file=path) as server:
        wire = await Wire.connect(server.address)
        wire.send("hello", token="a-token-of-namespaces", namespace="genie")
        await wire.expect("welcome")
        payload = {"resources": ["exclusive:a"]} if command == "request" else {}
        for namespace in ("genie", "billing"):
            wire.send(command, **payload, namespace=namespace)
            assert "this requires the permission" in (await expect_error(wire, "unauthorized"))["message"]


async def test_commands_after_an_invalid_hello_are_rejected_until_a_valid_one(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", namespace="no such thing!")
    wire.raw(b"{nonsense\n")
    wire.send("request", resources=["exclusive:not-executed"], ref="r")
    assert "namespace must be" in (await expect_error(wire, "bad-request"))["message"]
    await expect_error(wire, "bad-json")
    assert (await expect_error(wire, "unavailable"))["ref"] == "r"
    wire.send("hello", namespace="genie")
    await wire.expect("welcome")
    wire.send("inspect", resource="not-executed")
    assert (await wire.expect("inspected"))["holdersTotal"] == 0
