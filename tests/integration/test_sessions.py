"""Sessions survive disconnects, and restarts if the locks are stored in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.network.wire import Wire
from support.processes.servers import Genie, Redis, running_server
from support.storage.stores import stored_records

SECRET = "a secret that nobody can guess"  # noqa: S105 - it guards nothing


@pytest.fixture(params=["memory", "redis"])
def genie(request: pytest.FixtureRequest) -> Iterator[Genie]:
    redis = request.getfixturevalue("redis") if request.param == "redis" else None
    with running_server(redis) as server:
        yield server


async def hello(genie: Genie, secret: str = SECRET, **payload: Any) -> tuple[Wire, bool]:
    client = await Wire.connect(genie.address)
    client.send("hello", session=secret, **payload)
    told = await client.expect("welcome")
    assert told["namespace"] == "genie"
    assert told["server"].startswith("genie/")
    return client, told["resumed"]


async def read_until_pong(client: Wire) -> list[tuple[str, dict[str, Any]]]:
    """All that was said before the answer to a ping."""
    client.send("ping")
    messages = []
    while (message := await client.receive())[0] != "pong":
        assert message[0] != "closed", messages
        messages.append(message)
    return messages


async def read_ids(client: Wire) -> list[tuple[str, int]]:
    return [(command, payload["id"]) for command, payload in await read_until_pong(client)]


async def test_replies_missed_while_disconnected_are_sent_at_the_resumption(genie: Genie) -> None:
    other, client = await Wire.connect(genie.address), (await hello(genie))[0]
    blocker = await other.lock("exclusive:a", transactionTimeout=600_000)
    keys = await other.lock("exclusive:b")
    granted = await client.request("exclusive:b", ref="g", transactionTimeout=500_000)
    lost = await client.lock("exclusive:c", ref="c")
    timed_out = await client.request("exclusive:a", queueTimeout=300, ref="t")
    await client.close()
    await other.release(keys)
    await other.release(lost)
    watcher = await Wire.connect(genie.address)
    assert (await watcher.request("exclusive:a", queueTimeout=700)) > timed_out
    await watcher.expect("released")  # so the earlier one has timed out, too
    again, _ = await hello(genie)
    messages = await read_until_pong(again)
    assert [word for word, _ in messages] == ["released", "released", "locked"]
    words = {payload["id"]: payload for _, payload in messages}
    assert words[lost]["reason"] == "success"
    assert (words[timed_out]["reason"], words[timed_out]["ref"]) == ("queue-timeout", "t")
    assert words[timed_out]["blockers"][0]["id"] == blocker
    assert (messages[-1][1]["id"], words[granted]["ref"]) == (granted, "g")
    assert 0 < words[granted]["expiresIn"] <= 500_000
    await again.close()
    again, _ = await hello(genie)
    assert [id_ for _, id_ in await read_ids(again)] == list(words), "it may have been lost on the way"


async def test_hello_must_be_the_first_command_and_sent_once(genie: Genie) -> None:
    client = await Wire.connect(genie.address)
    client.raw(b"\r\n\n")
    client.send("hello", session=SECRET)
    assert not (await client.expect("welcome"))["resumed"]
    client.send("hello", session=SECRET)
    assert "first" in (await client.expect("error"))["message"]
    late = await Wire.connect(genie.address)
    late.send("ping")
    late.send("hello", session=SECRET)
    await late.expect("pong")
    assert "first" in (await late.expect("error"))["message"]
    anonymous = await Wire.connect(genie.address)
    anonymous.send("hello")
    assert not (await anonymous.expect("welcome"))["resumed"]


async def test_an_expired_session_cancels_its_waiting_requests(genie: Genie) -> None:
    holder, watcher = await Wire.connect(genie.address), await Wire.connect(genie.address)
    client, _ = await hello(genie, sessionTimeout=100)
    await holder.lock("exclusive:a", transactionTimeout=600_000)
    waiting = await client.request("exclusive:a", queueTimeout=600_000)
    bound = await client.lock("exclusive:b", onDisconnect="release", transactionTimeout=600_000)
    kept = await client.lock("exclusive:c", transactionTimeout=600_000)
    after = await watcher.request("exclusive:b", queueTimeout=600_000)
    await client.close()
    assert (await watcher.expect("locked"))["id"] == after
    again, resumed = await hello(genie)
    assert not resumed
    assert await read_until_pong(again) == []
    assert await watcher.release(waiting) == "disconnected"
    assert await watcher.release(bound) == "disconnected"
    if genie.redis_url:
        genie.kill()
        genie.start()
        again, resumed = await hello(genie)
        assert not resumed, "what it kept is no session's any more"
        watcher = await Wire.connect(genie.address)
    assert await watcher.release(kept) == "success"


async def test_a_session_survives_a_restart(redis: Redis) -> None:
    with running_server(redis) as genie:
        holder, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        client, _ = await hello(genie, sessionTimeout=60_000)
        second, _ = await hello(genie, "another secret, as good as that", sessionTimeout=60_000)
        held = await holder.lock("exclusive:a", transactionTimeout=600_000)
        ended = await client.request("exclusive:a", queueTimeout=50)
        assert (await client.expect("released"))["id"] == ended
        behind = await second.request("exclusive:a", queueTimeout=600_000)
        await other.request("exclusive:a", queueTimeout=600_000)  # has no session, and will be gone
        urgent = await client.request("exclusive:a", queueTimeout=600_000, priority=1, ref="u")
        mine = await client.lock("shared:b", transactionTimeout=600_000)
        genie.kill()
        genie.start()
        again, resumed = await hello(genie)
        assert resumed
        messages = await read_until_pong(again)
        assert [(word, payload["id"]) for word, payload in messages] == [
            ("released", ended),
            ("queued", urgent),
            ("locked", mine),
        ] or [(word, payload["id"]) for word, payload in messages] == [
            ("released", ended),
            ("locked", mine),
            ("queued", urgent),
        ]
        assert messages[0][1]["blockers"][0]["id"] == held
        second, resumed = await hello(genie, "another secret, as good as that")
        assert resumed
        assert await read_ids(second) == [("queued", behind)]
        again.send("request", resources=["exclusive:a"], queueTimeout=600_000, priority=1, ref="u")
        assert (await again.expect("queued"))["id"] == urgent
        assert await again.release(held) == "success"
        assert (await again.expect("locked"))["id"] == urgent, "the order is that of before"
        assert await again.release(urgent) == "success"
        assert (await second.expect("locked"))["id"] == behind


async def test_the_note_of_a_session_survives_a_restart(redis: Redis) -> None:
    """Also for a lock without a session, whose client can't come back, and for one whose session ends later."""
    with running_server(redis) as genie:
        client, _ = await hello(genie, sessionTimeout=1, note="worker 1@a")
        other = await Wire.connect(genie.address)
        other.send("hello", note="worker 2@a")
        await other.expect("welcome")
        for wire, name in ((client, "a"), (other, "b")):
            await wire.lock(f"exclusive:{name}", transactionTimeout=600_000)
        genie.kill()
        genie.start()
        watcher = await Wire.connect(genie.address)
        for name, note in (("a", "worker 1@a"), ("b", "worker 2@a")):
            rejected = await watcher.request(f"exclusive:{name}", queueTimeout=0)
            blockers = (await watcher.expect("released"))["blockers"]
            assert [blocker["note"] for blocker in blockers] == [note], rejected


async def test_the_first_blockers_of_a_wait_do_not_survive_a_restart(redis: Redis) -> None:
    """A `locked` after a wait has blockers, also after a resumption, but the leader does not store them."""
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    with running_server(redis) as genie:
        holder, (client, _) = await Wire.connect(genie.address), await hello(genie, sessionTimeout=60_000)
        held = [await holder.lock(f"exclusive:{name}", transactionTimeout=600_000) for name in "ab"]
        for ref, name in enumerate("ab"):
            await client.request(
                f"exclusive:{name}",
                queueTimeout=600_000,
                transactionTimeout=600_000,
                ref=f"{ref}",
                traceparent=traceparent,
            )
        await client.close()
        client, resumed = await hello(genie)
        assert resumed
        await read_until_pong(client)
        await holder.release(held[0])
        locked = await client.expect("locked")
        assert [blocker["id"] for blocker in locked["blockers"]] == [held[0]]
        assert (locked["blockersTotal"], "expiresIn" in locked) == (1, False)
        genie.kill()
        genie.start()
        client, resumed = await hello(genie)
        assert resumed
        (repeated,) = [payload for command, payload in await read_until_pong(client) if command == "locked"]
        assert (repeated["id"], "expiresIn" in repeated, "blockers" in repeated) == (locked["id"], True, False)
        await client.release(held[1])
        locked = await client.expect("locked")
        assert locked.keys() == {"id", "fence", "ref"}


async def test_an_ended_session_leaves_nothing_in_redis(redis: Redis) -> None:
    with running_server(redis) as genie:
        client, _ = await hello(genie, sessionTimeout=100)
        other = await Wire.connect(genie.address)
        held = await other.lock("exclusive:a")
        assert (await client.request("exclusive:a", queueTimeout=0)) > held
        await client.expect("released")
        one = await client.request("exclusive:a")
        assert await client.release(one) == "success"
        two = await client.request("exclusive:a")
        assert await other.release(two) == "success"
        assert (await client.expect("released"))["id"] == two
        assert set(stored_records(redis)) == {held, two}
        three = await client.lock("exclusive:b", ref="three")
        assert await client.release(three) == "success"
        assert set(stored_records(redis)) == {held, two, three}, "its ref is remembered"
        await client.close()
        await other.request("exclusive:a", queueTimeout=400)
        await other.expect("released")
        assert set(stored_records(redis)) == {held}


async def test_the_ref_of_a_release_survives_a_restart(redis: Redis) -> None:
    """Keep one lock, release another, restart, resume: repeating the ended one's ref must not lock again."""
    with running_server(redis) as genie:
        client, _ = await hello(genie, sessionTimeout=60_000)
        kept = await client.lock("exclusive:kept", ref="kept", transactionTimeout=600_000)
        job = await client.lock("exclusive:job", ref="job")
        assert await client.release(job) == "success"
        genie.kill()
        genie.start()
        again, resumed = await hello(genie, sessionTimeout=60_000)
        assert resumed
        assert await read_ids(again) == [("locked", kept)], "what the session released itself is not sent again"
        again.send("request", resources=["exclusive:job"], ref="job")
        assert await read_until_pong(again) == [
            ("queued", {"id": job, "ref": "job"}),
            ("released", {"id": job, "reason": "success", "ref": "job"}),
        ]
        again.send("release", ref="job")
        assert (await again.expect("released"))["id"] == job
        again.send("release", id=job, ref="again")
        assert await again.expect("released") == {"id": job, "reason": "success", "ref": "again"}
        again.send("inspect", resource="job")
        assert (await again.expect("inspected"))["holdersTotal"] == 0


async def test_a_ref_survives_a_disconnect_however_its_request_ended(genie: Genie) -> None:
    client, other = (await hello(genie))[0], await Wire.connect(genie.address)
    ended = {}
    for ref in ("own", "other", "timeout"):
        timeout = 20 if ref == "timeout" else 600_000
        ended[ref] = await client.lock(f"exclusive:{ref}", ref=ref, transactionTimeout=timeout)
    await client.expect("released")
    assert await client.release(ended["own"]) == "success"
    assert await other.release(ended["other"]) == "success"
    await client.expect("released")
    await client.close()
    again, _ = await hello(genie)
    await read_until_pong(again)
    for ref, id_ in ended.items():
        timeout = 20 if ref == "timeout" else 600_000
        again.send("request", resources=[f"exclusive:{ref}"], ref=ref, transactionTimeout=timeout)
        messages = await read_until_pong(again)
        assert [(word, payload["id"], payload["ref"]) for word, payload in messages] == [
            ("queued", id_, ref),
            ("released", id_, ref),
        ]


async def test_bye_ends_the_session_at_once(genie: Genie) -> None:
    client, watcher = (await hello(genie, sessionTimeout=600_000))[0], await Wire.connect(genie.address)
    kept = await client.lock("exclusive:kept", transactionTimeout=600_000)
    bound = await client.lock("exclusive:bound", onDisconnect="release", transactionTimeout=600_000)
    await client.request("exclusive:kept", ref="w", queueTimeout=600_000)
    after = await watcher.request("exclusive:bound", queueTimeout=600_000)
    client.send("bye", ref="b")
    client.send("request", resources=["exclusive:behind"])
    messages = [await client.receive() for _ in range(4)]
    assert {(word, payload["reason"], payload.get("ref")) for word, payload in messages[:2]} == {
        ("released", "disconnected", None),
        ("released", "disconnected", "w"),
    }
    assert messages[2:] == [("bye", {"ref": "b"}), ("closed", {})]
    assert (await watcher.expect("locked"))["id"] == after
    assert await watcher.release(bound) == "disconnected"
    watcher.send("inspect", resource="behind")
    assert (await watcher.expect("inspected"))["holdersTotal"] == 0, "nothing behind bye is executed"
    again, resumed = await hello(genie)
    assert not resumed
    assert await read_until_pong(again) == []
    assert await watcher.release(kept) == "success"
    if genie.redis_url:
        genie.kill()
        genie.start()
        _, resumed = await hello(genie)
        assert not resumed


async def test_quiet_mode_suppresses_queued(genie: Genie) -> None:
    client, other = (await hello(genie, quiet=True))[0], await Wire.connect(genie.address)
    held = await other.lock("exclusive:a", transactionTimeout=600_000)
    client.send("request", resources=["exclusive:b"], ref="1")
    client.send("request", resources=["exclusive:a"], ref="2", queueTimeout=600_000)
    client.send("request", anyOf=["exclusive:c"], target=1, ref="3")
    client.send("request", resources=["exclusive:a"], ref="4", queueTimeout=0)
    client.send("request", resources=["exclusive:d"])
    messages = await read_until_pong(client)
    assert [(word, payload.get("ref")) for word, payload in messages] == [
        ("locked", "1"),
        ("locked", "3"),
        ("released", "4"),
        ("queued", None),
        ("locked", None),
    ]
    await client.close()
    again, resumed = await hello(genie, quiet=True)
    assert resumed
    assert {word for word, _ in await read_until_pong(again)} == {"locked", "released"}
    again.send("request", resources=["exclusive:a"], ref="2", queueTimeout=600_000)
    assert await read_until_pong(again) == [], "it waits"
    assert await other.release(held) == "success"
    assert (await again.expect("locked"))["ref"] == "2"
    loud, _ = await hello(genie)
    assert {word for word, _ in await read_until_pong(loud)} == {"locked", "released"}
