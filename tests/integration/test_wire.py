"""The wire protocol of a real server, beyond the cases of the conformance kit, which test_conformance.py runs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest

from support.network.wire import Wire
from support.processes.servers import Genie, running_server


@pytest.fixture
async def wire(genie: Genie) -> AsyncIterator[Wire]:
    client = await Wire.connect(genie.address)
    yield client
    await client.close()


@pytest.fixture
async def other(genie: Genie) -> AsyncIterator[Wire]:
    client = await Wire.connect(genie.address)
    yield client
    await client.close()


async def test_waiters_are_granted_in_the_order_of_arrival(wire: Wire, other: Wire) -> None:
    first = await wire.lock("exclusive:handover")
    second = await other.request("exclusive:handover")
    third = await wire.request("shared:handover", "shared:more")
    assert first < second < third
    wire.send("release", id=first)
    assert (await wire.expect("released"))["id"] == first
    assert (await other.expect("locked"))["id"] == second
    assert await other.release(second) == "success"
    assert (await wire.expect("locked"))["id"] == third
    await wire.release(third)


async def test_a_thousand_commands_in_one_segment_are_answered_in_order(wire: Wire) -> None:
    lines = b"".join(
        b'{"command":"request","payload":{"resources":["exclusive:seg/%d"]}}\r\n\r\n' % i for i in range(1000)
    )
    wire.raw(lines)
    ids = []
    for _ in range(1000):
        ids.append((await wire.expect("queued"))["id"])
        await wire.expect("locked")
    assert ids == sorted(set(ids))
    wire.raw(b"".join(b'{"command":"release","payload":{"id":%d}}\n' % id_ for id_ in ids))
    assert [(await wire.expect("released"))["id"] for _ in ids] == ids


async def test_no_lock_times_out_early(wire: Wire) -> None:
    """By the clock of a client that counts from the moment at which it sends the request: both clocks are those of Linux."""
    for number in range(200):
        await asyncio.sleep(number % 5 * 0.0003)  # not in step with the server's milliseconds
        sent_at = time.monotonic()
        wire.send("request", resources=["exclusive:early"], transactionTimeout=3)
        await wire.expect("queued")
        await wire.expect("locked")
        assert (await wire.expect("released"))["reason"] == "transaction-timeout"
        assert (time.monotonic() - sent_at) * 1000 >= 3


async def test_an_unknown_id_is_an_error(wire: Wire) -> None:
    for id_ in (1, 0, -5, 2**53 - 1):
        wire.send("release", id=id_)
        assert (await wire.expect("error"))["code"] == "unknown-id"
    for number in (2**53, 2**64, 10**400):
        for more in (b"", b',"more":1'):
            wire.raw(b'{"command":"release","payload":{"id":%d%b}}\n' % (number, more))
            assert (await wire.expect("error"))["code"] in ("bad-request", "bad-json")


async def test_sigterm_completes_accepted_commands() -> None:
    with running_server() as genie:
        client = await Wire.connect(genie.address)
        await client.lock("exclusive:term")
        genie.send(signal.SIGTERM)
        assert await client.receive() == ("closed", {})
        assert genie.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*genie.address)
        await client.close()


async def test_a_second_server_on_the_port_fails_in_one_line(genie: Genie) -> None:
    second = Genie(port=genie.port)
    second.start(wait=False)
    assert second.wait() != 0
