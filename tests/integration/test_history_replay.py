"""The history of real servers is repeated exactly: also after a takeover, and with sessions that move to another connection."""

from __future__ import annotations

from pathlib import Path

from genie.history.search import Entry, Query, search
from support.network.wire import Wire
from support.processes.commands import genie_cli
from support.processes.servers import Genie, Redis
from support.processes.waiting import until


def find(directory: Path, **query: object) -> dict[int, Entry]:
    return {entry.id: entry for entry in search(directory / "genie", Query(**query)).requests}  # type: ignore[arg-type]


async def hello(address: tuple[str, int], session: str) -> Wire:
    wire = await Wire.connect(address)
    wire.send("hello", client="test", session=session)
    await wire.expect("welcome")
    return wire


async def test_takeovers_of_sessions_and_leadership_are_repeated(tmp_path: Path, redis: Redis) -> None:
    server = Genie(redis, history_dir=tmp_path, lease=1)
    server.start()
    try:
        wire = await hello(server.address, "0123456789abcdef")
        held = await wire.lock("exclusive:a", "shared:c", transactionName="one")
        waiting = await wire.request("exclusive:a", transactionName="two", queueTimeout=600_000)
        bound = await wire.lock("exclusive:b", onDisconnect="release")
        other = await Wire.connect(server.address)
        anonymous = await other.request("exclusive:b", transactionName="three", queueTimeout=600_000)
        moved = await hello(server.address, "0123456789abcdef")  # takes the session over
        moved.send("request", resources=["exclusive:d"])
        moved.send("request", anyOf=["exclusive:a", "exclusive:d"], weights=[1, 1], target=1)
        await until(lambda: len(find(tmp_path)) == 6)
        (insufficient,) = [entry for entry in find(tmp_path).values() if entry.reason == "insufficient"]
        assert insufficient.exclusive == insufficient.shared == ()
        server.kill()
        server.start()
        again = await hello(server.address, "0123456789abcdef")
        again.send("release", id=held)
        await until(lambda: find(tmp_path)[held].ended_at is not None)
        await until(lambda: find(tmp_path)[waiting].granted_at is not None)
        entries = find(tmp_path)
        assert entries[held].reason == "success"
        assert entries[waiting].asked_at is not None
        assert entries[bound].last_at is None  # its session lives on
        assert entries[anonymous].record_ends_at is not None  # a wait without a session ends with the leader
    finally:
        server.kill()
    replayed = genie_cli("replay", "--history-dir", str(tmp_path))
    assert replayed.returncode == 0, replayed.stderr
    assert "are the same as recorded" in replayed.stdout
