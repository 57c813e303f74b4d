"""The lock order of a running server: `genie order`, `/api/order`, the metric, the log, and the examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.admin.models import Order, OrderEdge, OrderExample
from support.admin.client import fetch
from support.admin.fake_admin import fake_admin
from support.network.wire import Wire
from support.processes.commands import genie_cli
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, running_server

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WALLET = ROOT / "applications/tokens/examples/wallet.py"


EDGE = OrderEdge(
    held="accounts/\x1b*",
    held_mode="exclusive",
    asked="accounts/\x1b*",
    asked_mode="exclusive",
    relation="ascending",
    count=2,
    last_at=1_790_000_000_000,
    guards=[],
    example=OrderExample(at=1_790_000_000_000, id=1, transaction_name="t", held="accounts/1", asked="accounts/2"),
)


@pytest.fixture
def server() -> Iterator[Genie]:
    with running_server(admin_port=free_port()) as genie:
        yield genie


async def run_transaction(wire: Wire, name: str, *names: str, note: str = "") -> None:
    held = [await wire.lock(f"exclusive:{each}", transactionName=name, note=note or name) for each in names]
    for id_ in held:
        await wire.release(id_)


async def test_an_inversion_is_shown_in_every_form(server: Genie) -> None:
    wire = await Wire.connect(server.address)
    port = server.settings["admin_port"]
    await run_transaction(wire, "pay-1", "accounts/1", "orders/2", note="checkout")
    await run_transaction(wire, "ship-7", "orders/7", "accounts/5", note="shipping")

    logged = server.until("lock order inversion detected")
    assert (logged["kind"], logged["classes"]) == ("cycle", ["orders/*", "accounts/*"])
    assert [edge["transaction"] for edge in logged["edges"]] == ["ship-7", "pay-1"]

    lines = genie_cli("order", admin_port=str(port)).stdout.splitlines()
    assert lines[:2] == [
        "Can deadlock: orders/* and accounts/* are locked in both orders.",
        "  ship-7 held exclusive:orders/7 and asked for exclusive:accounts/5",
    ]
    assert lines[2].endswith("note: shipping; seen once")
    dot = genie_cli("order", "--dot", admin_port=str(port)).stdout
    assert '"orders/*" -> "accounts/*" [label="1" color=red];' in dot
    shown = json.loads(genie_cli("order", "--json", admin_port=str(port)).stdout)
    assert (shown["total"], shown["edgesTotal"], shown["classes"], shown["dropped"]) == (1, 2, 2, 0)
    metrics = (await fetch(int(str(port)), "/metrics")).body.decode()
    assert 'genie_lock_order_inversions_total{namespace="genie"} 1.0' in metrics

    await run_transaction(wire, "pay-2", "accounts/1", "orders/2")
    for _ in range(3):
        await run_transaction(wire, "other", "apples", "pears")
    dot = genie_cli("order", "--dot", "--limit", "1", admin_port=str(port)).stdout
    assert '"apples" -> "pears" [label="3"];' in dot
    assert '"accounts/*" -> "orders/*" [label="2" color=red];' in dot


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([], "No transaction has asked for a lock while it held another one."),
        ([EDGE], "No inversion: no two transactions that were seen can deadlock."),
    ],
)
def test_without_an_inversion(edges: list[OrderEdge], expected: str) -> None:
    with fake_admin() as admin:
        admin.responses["/api/order"] = Order(
            inversions=[], total=0, guarded=[], edges=edges, edges_total=3, classes=1, dropped=7
        )
        lines = genie_cli("order", "--limit", "5", admin_port=str(admin.port)).stdout.splitlines()
        assert lines[0] == expected
        assert admin.paths == ["/api/order?limit=5"]
    if edges:
        assert lines[3].startswith("exclusive:accounts/\\x1b*  →  exclusive:accounts/\\x1b* (ascending)         2  ")
        assert lines[4:] == ["1 of 3 edges are shown.", "7 requests were not analysed completely, because of a limit."]


async def test_the_analysis_can_be_switched_off() -> None:
    with running_server(admin_port=free_port(), lock_order="off") as server:
        wire = await Wire.connect(server.address)
        for names in ("ab", "ba"):
            await run_transaction(wire, names, *names)
        shown = genie_cli("order", admin_port=str(server.settings["admin_port"]))
        assert (shown.returncode, shown.stderr) == (
            1,
            "genie: not-found: the analysis of the lock order is off: start the server with --lock-order on\n",
        )
        assert "lock_order" not in (await fetch(int(str(server.settings["admin_port"])), "/metrics")).body.decode()


async def test_rules_of_the_setting() -> None:
    with running_server(admin_port=free_port(), lock_order_rules="a/*,b=ignored") as server:
        wire = await Wire.connect(server.address)
        for names in (("a/x", "c"), ("c", "a/y"), ("c", "b"), ("b", "c")):
            await run_transaction(wire, "t", *names)
        order = (await fetch(int(str(server.settings["admin_port"])), "/api/order")).as_(Order)
        assert [inversion.classes for inversion in order.inversions] == [["c", "a/*"]]


async def order_of(server: Genie, program: Path, *options: str) -> Order:
    """Run an example to its end, and return the lock order that the server has observed."""
    port = int(str(server.settings["port"]))
    variables = os.environ | {"GENIE_HOST": "127.0.0.1", "GENIE_PORT": str(port)}
    done = subprocess.run(  # noqa: ASYNC221 - nothing else runs in this event loop
        [sys.executable, str(program), *options],
        env=variables,
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return (await fetch(int(str(server.settings["admin_port"])), "/api/order")).as_(Order)


async def test_the_bank_locks_accounts_in_no_order(server: Genie) -> None:
    """Some of its clerks lock two accounts step by step. Nobody waits here, because there is one clerk of each kind."""
    order = await order_of(
        server, EXAMPLES / "bank.py", *["--workers", "2", "--accounts", "5", "--transfers", "30", "--pause", "0"]
    )
    assert [(each.kind, each.classes[0]) for each in order.inversions] == [("members", "accounts/*")]
    assert not order.dropped


PAYMENT = "            await asyncio.sleep(self.random.uniform(0, self.options.pause))  # simulates work\n"
WITH_INVERSION = """\
            order = ["audit", payer] if self.payment_count % 2 else [payer, "audit"]
            async with genie.connect() as client, client.lock(order[0], transaction=name):
                async with client.lock(order[1], transaction=name):
                    pass
"""


async def test_the_wallet_has_only_the_inversion_that_is_planted(server: Genie, tmp_path: Path) -> None:
    source = (WALLET).read_text()
    options = ["--replicas", "1", "--at-a-time", "1", "--seconds", "1"]
    assert (await order_of(server, WALLET, *options)).inversions == []
    assert PAYMENT in source
    planted = tmp_path / "wallet.py"
    planted.write_text(source.replace(PAYMENT, WITH_INVERSION))
    order = await order_of(server, planted, *options)
    assert {(each.kind, frozenset(each.classes)) for each in order.inversions} == {
        ("cycle", frozenset({"audit", "wallet-*"}))
    }
