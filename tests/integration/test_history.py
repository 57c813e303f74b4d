"""The history of a real server: recorded while it works, and searched after it was killed and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.admin.models import History
from genie.history.archiver import archive_complete
from genie.history.search import Entry, Query, search
from genie.history.segments import list_segments
from genie.history.writer import HistoryWriter
from support.admin.client import fetch
from support.core.history_recording import Recording
from support.network.wire import Wire
from support.processes.commands import genie_cli
from support.processes.ports import free_port
from support.processes.servers import Genie, Redis, running_server
from support.processes.waiting import until


def find(directory: Path, **query: object) -> list[Entry]:
    return search(directory / "genie", Query(**query)).requests  # type: ignore[arg-type]


async def test_a_killed_server_leaves_a_history_that_its_successor_continues(tmp_path: Path, redis: Redis) -> None:
    server = Genie(redis, history_dir=tmp_path, lease=1)
    server.start()
    try:
        wire = await Wire.connect(server.address)
        held = await wire.lock("exclusive:accounts/42", transactionName="transfer-1", note="checkout")
        done = await wire.lock("exclusive:accounts/7")
        await wire.release(done)
        waiting = await wire.request("exclusive:accounts/42", transactionName="transfer-2")
        await until(lambda: len(find(tmp_path)) == 3)
        before = find(tmp_path)
        assert [(entry.id, entry.reason) for entry in before] == [(held, None), (done, "success"), (waiting, None)]
        server.kill()
        server.start()
        wire = await Wire.connect(server.address)
        await wire.release(held)
        await until(lambda: find(tmp_path, transaction="transfer-1")[0].ended_at is not None)
        (entry,) = find(tmp_path, transaction="transfer-1")
        assert (entry.id, entry.note, entry.reason) == (held, "checkout", "success")
        assert entry.granted_at == before[0].granted_at
        # The second server archives what the first has left.
        await until(lambda: any(segment.is_archived for segment in list_segments(tmp_path / "genie")))
    finally:
        server.kill()
    shown = genie_cli("history", "accounts/42", "--history-dir", str(tmp_path))
    assert "transfer-1 (checkout)" in shown.stdout


async def test_each_end_of_a_request_is_recorded(tmp_path: Path) -> None:
    with running_server(history_dir=tmp_path, history_redact="cards/") as server:
        wire, other = await Wire.connect(server.address), await Wire.connect(server.address)
        held = await wire.lock("exclusive:a", onDisconnect="release")
        late = await other.request("exclusive:a", queueTimeout=1)
        assert (await other.expect("released"))["reason"] == "queue-timeout"
        expired = await other.lock("exclusive:cards/4111", transactionTimeout=1)
        assert (await other.expect("released"))["reason"] == "transaction-timeout"
        await wire.close()
        await until(lambda: sum(entry.ended_at is not None for entry in find(tmp_path)) == 3)
        entries = {entry.id: entry for entry in find(tmp_path)}
        assert [str(entries[id_].reason) for id_ in (held, late, expired)] == [
            "disconnected",
            "queue-timeout",
            "transaction-timeout",
        ]
        assert [waiter.id for waiter in entries[late].waited_for] == [held]
        assert entries[expired].exclusive[0].startswith("cards/#")


async def test_a_server_without_events_deletes_what_is_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HistoryWriter, "_archive", lambda _self: None)  # the server must do it
    recording = Recording(tmp_path / "genie")  # long ago
    recording.request(0, "a")
    recording.stop()
    archive_complete(tmp_path / "genie")
    assert [segment.is_archived for segment in list_segments(tmp_path / "genie")] == [True]
    with running_server(history_dir=tmp_path):
        await until(lambda: not any(segment.is_archived for segment in list_segments(tmp_path / "genie")))


def test_a_directory_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = genie_cli("serve", "--port", str(free_port()), "--history-dir", str(tmp_path / "file"), admin_port="")
    assert result.returncode != 0
    assert "--history-dir: cannot write to" in result.stderr


async def test_the_admin_port_has_the_history_of_a_resource(tmp_path: Path) -> None:
    with running_server(history_dir=tmp_path, admin_port=free_port()) as server:
        port = int(str(server.settings["admin_port"]))
        wire = await Wire.connect(server.address)
        held = await wire.lock("exclusive:accounts/1", "shared:b", transactionName="transfer", note="n")
        waits = await wire.request("shared:accounts/1")
        await until(lambda: len(find(tmp_path)) == 2)
        response = (await fetch(port, "/api/history/accounts%2F1")).as_(History)
        assert [request.id for request in response.requests] == [held, waits]
        assert response.requests[0].resources == ["exclusive:accounts/1", "shared:b"]
        assert response.requests[1].waited_for == [held]
        assert (await fetch(port, "/api/history/unknown")).as_(History).requests == []
        damaged = tmp_path / "genie" / "20000101T000000.000000Z-00000000-000001.jsonl.gz"
        damaged.write_text("nonsense")
        damaged.with_name(damaged.name.replace(".jsonl.gz", ".index")).write_text("nonsense")
        assert (await fetch(port, "/api/history/accounts%2F1")).problem[:2] == (500, "unreadable")
    with running_server(admin_port=free_port()) as server:
        assert (await fetch(int(str(server.settings["admin_port"])), "/api/history/a")).problem[:2] == (
            404,
            "not-found",
        )


async def test_the_command_shows_units_and_the_subtree_that_contained_the_name(tmp_path: Path) -> None:
    with running_server(history_dir=tmp_path) as server:
        wire = await Wire.connect(server.address)
        first = await wire.lock("2/10:h/pool", "exclusive:other", transactionName="render")
        await wire.release(first)
        second = await wire.lock("shared:h/**", transactionName="books")
        await wire.release(second)
        await until(lambda: [entry.ended_at is None for entry in find(tmp_path)] == [False, False])
    rows = genie_cli("history", "h/pool", "--history-dir", str(tmp_path)).stdout.splitlines()[1:]
    assert [row.split()[3:5] for row in rows] == [["render", "2/10"], ["books", "shared:h/**"]]
    (row,) = genie_cli("history", "h/**", "--history-dir", str(tmp_path)).stdout.splitlines()[1:]
    assert row.split()[3:5] == ["books", "shared"]
