"""`genie store` with a real Redis: each finding of `check`, and export and import between namespaces and Redises."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
import structlog
from click.testing import CliRunner

from genie.cli import main
from genie.core import HELD, Request
from genie.storage.redis import keyspace
from genie.storage.redis.check import check_namespace
from genie.storage.redis.keyspace import FIRST_CHUNK
from genie.storage.redis.primary import Primary
from genie.storage.redis.records import encode
from redises.cluster import running_cluster
from redises.sentinels import running_sentinels
from support.network.wire import Wire
from support.processes.commands import genie_cli
from support.processes.programs import CLI
from support.processes.servers import Genie, Redis, running_redis

LEASE_S = 0.3
RECORDS = 100_000
LONG_DOWN_AFTER_MS = 3_000
"""So long that no process of a test counts as down."""
LOCK = '{"since":1.0,"since_unix_ms":1,"deadline":60000,"exclusive":["%s"],"fence":%d}'
WAITING = '{"since":1.0,"since_unix_ms":1,"deadline":60000,"state":"queued","session":"s","exclusive":["%s"]}'
UNITS = '{"since":1.0,"since_unix_ms":1,"deadline":60000,"fence":%d,"details":{"units":{"pool":[%d,%d]}}}'
SUBTREE = LOCK[:-1] + ',"details":{"subtrees":true}}'
COUNTERS = "50.000 100 100"


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[Redis]:
    with running_redis() as server:
        yield server


class Stored:
    """A namespace whose keys the tests write themselves: two epochs, a checkpoint in the second one, and a batch after it."""

    def __init__(self, redis: Redis, name: str) -> None:
        self.name = name
        self.redis = redis
        self.client = redis_py.Redis(port=redis.port)
        self.prefix = f"{{{name}}}:"
        self.state = f"{self.prefix}state:7-n"
        self.log = f"{self.prefix}log"
        self.meta = f"{self.prefix}meta"
        node = '{"address":"one:1","lease_ms":300}'
        self.client.delete(*self.client.keys(f"{self.prefix}*") or ["-"])
        self.client.xadd(self.log, {"base": "0-0", "node": ""}, "5-0")
        self.client.xadd(self.log, {"batch": "10.000 20 20"}, "5-1")
        self.client.xadd(self.log, {"base": "5-1", "node": node}, "7-0")
        self.batch("7-1", f"40.000 90 90\n1 {LOCK % ('a', 1)}")
        self.batch("7-2", f"{COUNTERS}\n2 {LOCK % ('b', 2)}\n1")
        self.client.hset(self.state, mapping={"0": "", "1": LOCK % ("a", 1), "3": LOCK % ("c", 3)})
        self.client.sadd(f"{self.prefix}snapshots", self.state)
        self.set(version=1, epoch=7, nonce="n", node=node, history="0-0 5-1", state=self.state, attempt=1)
        self.set(checkpoint="7-1 40.000 90 90")

    def batch(self, id_: str, text: str) -> None:
        self.client.xadd(self.log, {"batch": text}, id_)

    def set(self, **fields: object) -> None:
        self.client.hset(self.meta, mapping={name: str(value) for name, value in fields.items()})

    def record(self, id_: int, record: str) -> None:
        self.client.hset(self.state, str(id_), record)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return genie_cli("store", *arguments, redis_url=self.redis.url, namespace=self.name)

    def check(self) -> dict[str, Any]:
        done = self.run("check", "--json")
        assert done.stderr == ""
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if report["sound"] else 1)
        return report


@pytest.fixture
def stored(shared_redis: Redis) -> Stored:
    return Stored(shared_redis, "checked")


def test_a_sound_namespace(stored: Stored) -> None:
    report = stored.check()
    sizes = report.pop("sizes")
    assert sizes.pop("logMemory") > 0
    assert sizes.pop("stateMemory") > 0
    assert report == {
        "namespace": "checked",
        "sound": True,
        "findings": [],
        "omittedFindings": 0,
        "version": "1",
        "epoch": 7,
        "leader": {"address": "one:1", "leaseMs": 300},
        "position": "7-2",
        "checkpoint": "7-1",
        "counters": {"clockMs": 50.0, "nextId": 100, "nextFence": 100},
        "abandonedStates": [],
    }
    assert sizes.pop("logBytes") > 0
    assert sizes == {"logEntries": 5, "stateRecords": 2, "held": 2, "waiting": 0, "retainedReplies": 0}


def test_the_report_for_people(stored: Stored) -> None:
    done = stored.run("check")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[1] == "leader      one:1, lease 0.3 s, epoch 7"
    assert lines[-2:] == ["requests    held: 2, waiting: 0, retained replies: 0", "sound"]
    stored.client.delete(stored.state)
    done = stored.run("check")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        f"FINDING     checkpoint: the state {stored.state} is missing: Redis has lost a key",
        "NOT SOUND",
    ]


def raw(stored: Stored, *command: str) -> None:
    stored.client.execute_command(*command)


TAMPERED = {
    "another version": (lambda s: s.set(version=2), "meta", "format version 2, and this version of Genie knows 1"),
    "no version": (lambda s: s.client.hdel(s.meta, "version"), "meta", "format version none"),
    "no history": (lambda s: s.client.hdel(s.meta, "history"), "meta", "lacks history"),
    "an invalid checkpoint": (lambda s: s.set(checkpoint="7-x 1 1 1"), "meta", "a field is invalid"),
    "an invalid node": (lambda s: s.set(node="{"), "meta", "a field is invalid"),
    "a log of another type": (
        lambda s: s.client.delete(s.log) and s.client.set(s.log, ""),
        "meta",
        "a key has another type",
    ),
    "no metadata": (lambda s: s.client.delete(s.meta), "meta", "the metadata is missing"),
    "no log": (lambda s: s.client.delete(s.log), "log", "the log is missing"),
    "no state": (lambda s: s.client.delete(s.state), "checkpoint", "is missing: Redis has lost a key"),
    "a state of another type": (
        lambda s: s.client.delete(s.state) and s.client.set(s.state, ""),
        "checkpoint",
        "the state is a string",
    ),
    "a history that descends": (
        lambda s: s.set(history="9-1 5-1"),
        "epochs",
        "the history is not ascending: 9-1 5-1 7-2",
    ),
    "another history": (
        lambda s: s.set(history="0-0 5-3"),
        "epochs",
        "epoch 7 continues from 5-1 in the log, and from 5-3 in the history",
    ),
    "another epoch": (lambda s: s.set(epoch=8), "epochs", "the log ends in epoch 7, and the metadata has 8"),
    "another leader": (lambda s: s.set(node=""), "epochs", "the metadata names another leader than the takeover 7-0"),
    "a checkpoint on another lineage": (
        lambda s: s.set(checkpoint="6-1 1 1 1"),
        "checkpoint",
        "the checkpoint 6-1 is not on the history",
    ),
    "a log that begins after the checkpoint": (
        lambda s: s.set(checkpoint="5-1 1 1 1") or s.client.xtrim(s.log, minid="7-1", approximate=False),
        "checkpoint",
        "the log begins with 7-1, and does not reach back to the checkpoint 5-1",
    ),
    "a gap": (lambda s: s.client.xdel(s.log, "7-1"), "log", "7-2 does not continue 7-0"),
    "a takeover from another position": (lambda s: s.client.xdel(s.log, "5-1"), "log", "7-0 does not continue 5-0"),
    "an unknown entry": (
        lambda s: raw(s, "XADD", s.log, "7-3", "x", "y"),
        "log",
        "7-3 is neither a takeover nor a batch",
    ),
    "a batch without counters": (lambda s: s.batch("7-3", ""), "log", "7-3 cannot be decoded"),
    "an unknown field in the log": (
        lambda s: s.batch("7-3", COUNTERS + '\n9 {"since":1,"since_unix_ms":1,"deadline":1,"new":1}'),
        "log",
        "7-3 cannot be decoded: the record of 9 was written by another version of Genie: Object contains unknown field",
    ),
    "a counter that falls": (
        lambda s: s.batch("7-3", "50.000 99 100"),
        "log",
        "the clock or a counter of 7-3 is lower than before",
    ),
    "an unknown field in the state": (
        lambda s: s.record(4, '{"since":1,"since_unix_ms":1,"deadline":1,"new":1}'),
        "records",
        "the record 4 of the state: the record of 4 was written by another version of Genie",
    ),
    "an unknown state of a request": (
        lambda s: s.record(4, '{"since":1,"since_unix_ms":1,"deadline":1,"state":"new"}'),
        "records",
        "the record 4 of the state: the record of 4 was written by another version of Genie: Invalid enum value 'new'",
    ),
    "a truncated record": (
        lambda s: s.record(4, '{"since"'),
        "records",
        "the record 4 of the state: the record of 4 is malformed: Input data was truncated",
    ),
    "an invalid id": (lambda s: raw(s, "HSET", s.state, "x", "{}"), "records", "the record x of the state"),
    "an unassigned id": (lambda s: s.record(100, LOCK % ("d", 4)), "locks", "the id 100 is not below the next id, 100"),
    "an unassigned fence": (
        lambda s: s.record(4, LOCK % ("d", 100)),
        "locks",
        "the fencing token 100 of request 4 is not below the next one, 100",
    ),
    "a fence of two locks": (
        lambda s: s.record(4, LOCK % ("d", 3)),
        "locks",
        "requests 3 and 4 both have the fencing token 3",
    ),
    "two holders": (lambda s: s.record(4, LOCK % ("b", 4)), "locks", "both hold 'b', and"),
    "a subtree and a name below it": (
        lambda s: [s.record(4, SUBTREE % ("d/**", 4)), s.record(5, LOCK % ("d/1", 5))],
        "locks",
        "requests 4 and 5 both hold names of 'd/**', and exclusive:d/** conflicts with exclusive:d/1",
    ),
    "too many units": (
        lambda s: [s.record(4, UNITS % (4, 2, 3)), s.record(5, UNITS % (5, 2, 3))],
        "locks",
        "request 5 holds '2/3:pool', and 4 units were in use with it",
    ),
    "no resource": (
        lambda s: s.record(4, '{"since":1,"since_unix_ms":1,"deadline":1,"fence":4}'),
        "locks",
        "request 4 names no resource",
    ),
    "a resource twice": (lambda s: s.record(4, LOCK % ('d","d', 4)), "locks", "request 4 names a resource twice"),
    "a position of two waiting requests": (
        lambda s: (s.record(4, WAITING % "c"), s.record(5, (WAITING % "c")[:-1] + ',"moved":{"c":[0,4]}}')),
        "locks",
        "requests 4 and 5 have the same position in the queue of 'c'",
    ),
    "a cycle": (
        lambda s: [
            s.record(4, LOCK[:-1] % ("d", 4) + ',"transaction":"t"}'),
            s.record(5, LOCK[:-1] % ("e", 5) + ',"transaction":"u"}'),
            s.record(6, (WAITING % "e")[:-1] + ',"transaction":"t"}'),
            s.record(7, (WAITING % "d")[:-1] + ',"transaction":"u"}'),
            s.record(8, WAITING % "d"),
        ],
        "locks",
        "3 owners wait for each other in a cycle, or for such a cycle, among them 't', 'u', 8",
    ),
}


@pytest.mark.parametrize(("tamper", "part", "message"), TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_namespace_is_not_sound(stored: Stored, tamper: Any, part: str, message: str) -> None:
    assert stored.check()["sound"]
    tamper(stored)
    findings = stored.check()["findings"]
    assert [finding for finding in findings if finding["part"] == part and message in finding["message"]], findings
    assert len(findings) == 1, findings


def test_checking_changes_nothing(stored: Stored) -> None:
    dump = {key: stored.client.dump(key) for key in stored.client.keys("*")}
    stored.check()
    assert {key: stored.client.dump(key) for key in stored.client.keys("*")} == dump


def test_abandoned_states_are_reported_and_are_no_finding(stored: Stored) -> None:
    abandoned = f"{stored.prefix}state:6-x"
    stored.client.sadd(f"{stored.prefix}snapshots", abandoned, f"{stored.prefix}state:gone")
    stored.client.hset(abandoned, "1", LOCK % ("a", 1))
    report = stored.check()
    assert (report["sound"], report["abandonedStates"]) == (True, [abandoned])


def test_each_part_reports_a_limited_number_of_findings(stored: Stored) -> None:
    for id_ in range(10, 40):
        stored.record(id_, "{")
    report = stored.check()
    assert (len(report["findings"]), report["omittedFindings"]) == (20, 10)
    assert "FINDING     and 10 more" in stored.run("check").stdout.splitlines()


def move_checkpoint(stored: Stored) -> None:
    """Commit, write a checkpoint of the end of the log, and trim the log up to it."""
    stored.batch("7-3", COUNTERS)
    stored.client.hset(stored.state, "2", LOCK % ("b", 2))
    stored.client.hdel(stored.state, "1")
    stored.set(checkpoint=f"7-3 {COUNTERS}")
    stored.client.xtrim(stored.log, minid="7-3", approximate=False)


def restore_snapshot(stored: Stored) -> None:
    """Replace the state and the log."""
    state = f"{stored.prefix}state:9-m"
    stored.client.delete(stored.log, stored.state)
    stored.client.hset(state, mapping={"0": "", "2": LOCK % ("b", 2), "3": LOCK % ("c", 3)})
    stored.client.xadd(stored.log, {"base": "", "node": ""}, "9-0")
    stored.set(epoch=9, nonce="m", node="", history="0-0 5-1 7-2", state=state, checkpoint=f"9-0 {COUNTERS}")


@pytest.mark.parametrize("change", [move_checkpoint, restore_snapshot])
@pytest.mark.parametrize("command", ["HSCAN", "XRANGE"])
async def test_what_a_leader_replaces_is_read_again(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, change: Callable[[Stored], None], command: str
) -> None:
    call, calls = Primary.call, Counter[str]()

    async def change_once(self: Primary, *parts: object, **options: Any) -> Any:
        name = command if command in parts else str(parts[0])
        calls[name] += 1
        if name == command and calls[name] == 1:
            change(stored)
        return await call(self, *parts, **options)

    monkeypatch.setattr(Primary, "call", change_once)
    report = await check_namespace(stored.redis.url, stored.name)
    assert report is not None
    assert (report.findings, report.sizes.held) == ([], 2)
    assert calls[command] > 1


async def test_a_check_reads_fewer_records_in_a_call_if_they_are_large(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.client.hset(stored.state, mapping={str(id_): LOCK % (f"resource-{id_}", id_) for id_ in range(10, 60)})
    call, counts = Primary.call, list[object]()

    async def record_count(self: Primary, *parts: object, **options: Any) -> Any:
        if "HSCAN" in parts:
            counts.append(parts[-1])
        return await call(self, *parts, **options)

    monkeypatch.setattr(Primary, "call", record_count)
    monkeypatch.setattr(keyspace, "CHUNK_BYTES", 1)
    report = await check_namespace(stored.redis.url, stored.name)
    assert report is not None
    assert (report.findings, report.sizes.state_records) == ([], 52)
    assert counts[0] == FIRST_CHUNK
    assert {*counts[1:]} == {1}


def test_warnings_are_not_part_of_an_export(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is trimmed while the state is read: it is read again, with a warning."""
    call, changes = Primary.call, [move_checkpoint]

    async def change_once(self: Primary, *parts: object, **options: Any) -> Any:
        if "HSCAN" in parts and changes:
            changes.pop()(stored)
        return await call(self, *parts, **options)

    monkeypatch.setattr(Primary, "call", change_once)
    arguments = ["store", "export", "--redis-url", stored.redis.url, "--namespace", stored.name]
    try:
        result = CliRunner().invoke(main, arguments)
    finally:
        structlog.reset_defaults()
    assert result.exit_code == 0
    assert "replication log was trimmed or replaced during load" in result.stderr
    assert [json.loads(line).get("id") for line in result.stdout.splitlines()] == [None, 2, 3, None]


@pytest.mark.parametrize("arguments", [["export"], ["import", "--replace"]])
def test_a_namespace_whose_log_has_a_gap_is_neither_exported_nor_replaced(
    stored: Stored, tmp_path: Path, arguments: list[str]
) -> None:
    backup = tmp_path / "backup.jsonl"
    assert stored.run("export", str(backup)).returncode == 0
    stored.client.hset(stored.meta, "node", "")
    stored.batch("7-3", COUNTERS)
    stored.client.xdel(stored.log, "7-2")
    done = stored.run(*arguments, str(backup))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"genie: {stored.log} lacks the entry after 7-1, which is later than the checkpoint, "
    )


def test_usage_and_unavailable_redis(stored: Stored) -> None:
    missing = genie_cli("store", "check", redis_url=stored.redis.url, namespace="missing")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == "genie: Redis has no namespace 'missing'\n"
    invalid = genie_cli("store", "check", "--redis-url", stored.redis.url, "--namespace", "a b")
    assert invalid.returncode == 2
    assert "'--namespace': it must be a string" in invalid.stderr
    assert genie_cli("store", "check", redis_url="redis://").returncode == 2
    for command in ("check", "export"):
        down = genie_cli("store", command, "--redis-host", "127.0.0.1", "--redis-port", "1")
        assert (down.returncode, down.stdout) == (2, "")
        assert down.stderr.startswith("genie: Redis is unavailable: 127.0.0.1:1")
        assert down.stderr.endswith(" (--redis-url chooses another)\n")
    stored.redis.call("ACL", "SETUSER", "reader", "on", ">secret", "allkeys", "-@all")
    denied = genie_cli("store", "check", redis_url=stored.redis.url.replace("redis://", "redis://reader:secret@"))
    assert (denied.returncode, denied.stdout) == (2, "")
    assert denied.stderr.startswith("genie: Redis denied access: ")


# -- export and import --------------------------------------------------------------------------------


def lines_of(stored: Stored) -> list[str]:
    done = stored.run("export")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_an_export_has_the_recovered_state(stored: Stored) -> None:
    stored.client.hset(stored.state, "8", WAITING % "c")
    header, *records, trailer = map(json.loads, lines_of(stored))
    assert header == {
        "format": "genie-namespace",
        "version": 1,
        "namespace": "checked",
        "position": "7-2",
        "clockMs": 50.0,
        "nextId": 100,
        "nextFence": 100,
    }
    assert [record["id"] for record in records] == [2, 3, 8]
    assert records[1]["record"] == json.loads(LOCK % ("c", 3))
    assert trailer == {"count": 3}


def test_a_namespace_that_no_server_could_lead_is_not_exported(stored: Stored, tmp_path: Path) -> None:
    stored.record(4, '{"since":1,"since_unix_ms":1,"deadline":1,"new":1}')
    done = stored.run("export", str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "unknown field `new`" in done.stderr
    stored.set(version=2)
    assert "format version 2" in stored.run("export").stderr
    assert list(tmp_path.iterdir()) == []


def imported(stored: Stored, lines: Sequence[str], tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "file"
    file.write_text("".join(f"{line}\n" for line in lines))
    return stored.run("import", str(file), *options)


@pytest.fixture
def empty(shared_redis: Redis) -> Stored:
    target = Stored(shared_redis, "target")
    target.client.delete(*target.client.keys(f"{target.prefix}*"))
    return target


def test_an_imported_namespace_is_sound_and_equal(stored: Stored, empty: Stored, tmp_path: Path) -> None:
    lines = lines_of(stored)
    done = imported(empty, lines, tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("imported 2 records into target, epoch ")
    report = empty.check()
    assert report["sound"]
    assert report["leader"] is None
    assert report["epoch"] > 7
    header, *copied = lines_of(empty)
    assert copied == lines[1:]
    position = f"{report['epoch']}-0"
    assert json.loads(header) == json.loads(lines[0]) | {"namespace": "target", "position": position}


def test_units_subtrees_and_positions_in_their_queues_are_imported(
    stored: Stored, empty: Stored, tmp_path: Path
) -> None:
    stored.record(4, UNITS % (4, 2, 3))
    stored.record(5, UNITS % (5, 2, 4))
    stored.record(6, SUBTREE % ("d/**", 6))
    for id_ in (7, 8):
        stored.record(id_, json.dumps(json.loads(WAITING % f"d/{id_}") | {"moved": {"d/**": [0, 15 - id_]}}))
    lines = lines_of(stored)
    assert json.loads(lines[-2])["record"]["moved"] == {"d/**": [0, 7]}
    assert imported(empty, lines, tmp_path).returncode == 0
    assert empty.check()["sound"]
    assert lines_of(empty)[1:] == lines[1:]


def test_the_epoch_and_the_counters_never_fall(stored: Stored, empty: Stored, tmp_path: Path) -> None:
    lines = lines_of(stored)
    future = 8 * 10**15  # later than any epoch number that the clock could give
    header = json.loads(lines[0]) | {"position": f"{future}-3"}
    assert imported(empty, [json.dumps(header), *lines[1:]], tmp_path).returncode == 0
    report = empty.check()
    assert report["epoch"] > future
    header = json.loads(lines[0]) | {"nextId": 50, "nextFence": 60, "clockMs": 20.0}
    assert imported(empty, [json.dumps(header), *lines[1:]], tmp_path, "--replace").returncode == 0
    again = empty.check()
    assert again["epoch"] > report["epoch"]
    assert again["counters"] == {"clockMs": 20.0, "nextId": 100, "nextFence": 100}


def test_locks_are_replaced_only_on_request(stored: Stored, empty: Stored, tmp_path: Path) -> None:
    lines = lines_of(stored)
    assert imported(empty, lines, tmp_path).returncode == 0
    before = empty.check()
    refused = imported(empty, [lines[0], '{"count":0}'], tmp_path)
    assert refused.returncode == 1
    assert refused.stderr == "genie: the namespace 'target' is not empty, it has 2 records: --replace deletes them\n"
    assert empty.check() == before
    done = imported(empty, [lines[0], '{"count":0}'], tmp_path, "--replace")
    assert (done.returncode, done.stderr.endswith(", replaced 2 records\n")) == (0, True)
    report = empty.check()
    assert (report["sound"], report["sizes"]["held"], report["abandonedStates"]) == (True, 0, [])
    # A namespace without records is empty: it needs no --replace.
    assert imported(empty, lines, tmp_path).returncode == 0


def test_a_namespace_of_another_format_is_not_replaced(stored: Stored, tmp_path: Path) -> None:
    lines = lines_of(stored)
    target = Stored(stored.redis, "target")
    target.set(version=2, node="")
    done = imported(target, lines, tmp_path, "--replace")
    assert done.returncode == 1
    assert "format version 2" in done.stderr


def edited(number: int, **fields: object) -> Any:
    """Return an edit of one line: the given fields are set, or deleted where the value is None."""

    def edit(lines: list[str]) -> list[str]:
        line = json.loads(lines[number]) | fields
        line = {name: value for name, value in line.items() if value is not None}
        return [*lines[:number], json.dumps(line), *(lines[number + 1 :] if number != -1 else [])]

    return edit


BROKEN = {
    "empty": (lambda _: [], "line 1: this is not an export of a namespace"),
    "another format": (edited(0, format="x"), "line 1: this is not an export of a namespace"),
    "another version": (edited(0, version=2), "line 1: the export has the format version 2"),
    "a header without a field": (edited(0, clockMs=None), "line 1: Object missing required field `clockMs`"),
    "a header with another field": (edited(0, more=1), "line 1: Object contains unknown field `more`"),
    "a header that is nested too deeply": (lambda _: ["[" * 100_000], "line 1: this is not an export of a namespace"),
    "a record that is nested too deeply": (
        lambda lines: [lines[0], '{"id":2,"record":' + "[" * 100_000],
        "line 2: maximum recursion depth exceeded",
    ),
    "an id that no client can read": (edited(0, nextId=2**53), "line 1: Expected `int` <= 9007199254740991"),
    "a clock that cannot advance": (edited(0, clockMs=1e308), "line 1: Expected `float` <= 9007199254740991"),
    "an invalid position": (edited(0, position="x"), "line 1: 'x' is not a position"),
    "an epoch that is too high": (edited(0, position=f"{2**53}-1"), "line 1: '9007199254740992-1' is not a position"),
    "a record without an id": (edited(1, id=None), "line 2: Object missing required field `id`"),
    "a line with another field": (edited(1, more=1), "line 2: Object contains unknown field `more`"),
    "a record with another field": (
        edited(1, record={"since": 1, "since_unix_ms": 1, "deadline": 1, "new": 1}),
        "line 2: the record of 2 was written by another version of Genie: Object contains unknown field `new`",
    ),
    "an id twice": (lambda lines: [lines[0], lines[1], *lines[1:]], "line 3: the id 2 follows 2, and ids must ascend"),
    "a missing record": (lambda lines: [lines[0], *lines[2:]], "line 3: the count is 2, and the file has 1 records"),
    "no last line": (lambda lines: lines[:-1], "the file is truncated"),
    "half a line": (lambda lines: [lines[0], lines[1][:30]], "line 2: Input data was truncated"),
    "text after the end": (lambda lines: [*lines, "{}"], "line 5: text after the line with the count"),
    "a counter that is too low": (
        edited(0, nextFence=3),
        "the fencing token 3 of request 3 is not below the next one, 3",
    ),
    "two holders": (
        lambda lines: [*lines[:-1], '{"id":9,"record":%s}' % (LOCK % ("b", 9)), '{"count":3}'],
        "requests 2 and 9 both hold 'b'",
    ),
}


@pytest.mark.parametrize(("edit", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_not_imported(stored: Stored, empty: Stored, tmp_path: Path, edit: Any, message: str) -> None:
    done = imported(empty, edit(lines_of(stored)), tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert empty.client.keys(f"{empty.prefix}*") == []


def test_files_that_cannot_be_opened(stored: Stored, tmp_path: Path) -> None:
    missing = stored.run("import", str(tmp_path / "missing"))
    assert (missing.returncode, "cannot read" in missing.stderr) == (2, True)
    unwritable = stored.run("export", str(tmp_path / "missing" / "file"))
    assert (unwritable.returncode, "cannot write" in unwritable.stderr) == (1, True)


# -- with servers -------------------------------------------------------------------------------------


async def lock(server: Genie, name: str) -> int:
    """Lock a name for ten minutes, without a session; return the fencing token."""
    wire = await Wire.connect(server.address)
    await wire.request(f"exclusive:{name}", transactionTimeout=600_000)
    return int((await wire.expect("locked"))["fence"])


async def test_a_namespace_moves_to_another_redis(redis: Redis, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with running_redis() as other:
        server = Genie(redis, lease=LEASE_S)
        server.start()
        fence = await lock(server, "a")
        # While the server leads, the namespace can be checked and exported, and not be replaced.
        assert genie_cli("store", "check", redis_url=redis.url).returncode == 0
        assert genie_cli("store", "export", str(file), redis_url=redis.url).returncode == 0
        refused = genie_cli("store", "import", str(file), "--replace", redis_url=redis.url)
        assert refused.returncode == 1
        assert f"the server at 127.0.0.1:{server.port} leads the namespace 'genie'" in refused.stderr
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert genie_cli("store", "export", str(file), redis_url=redis.url).returncode == 0
        assert genie_cli("store", "import", str(file), redis_url=other.url).returncode == 0
        moved = Genie(other, lease=LEASE_S)
        moved.start()
        assert moved.log[-1]["held_locks"] == 1
        assert await lock(moved, "b") > fence
        moved.kill()
        # The killed leader has not resigned: the import waits for its lease, then replaces its locks.
        replaced = genie_cli("store", "import", str(file), "--replace", redis_url=other.url)
        assert (replaced.returncode, replaced.stderr.endswith("replaced 2 records\n")) == (0, True)
        report = json.loads(genie_cli("store", "check", "--json", redis_url=other.url).stdout)
        assert (report["sound"], report["leader"], report["sizes"]["held"]) == (True, None, 1)


async def test_a_running_follower_loads_an_imported_state(redis: Redis, tmp_path: Path) -> None:
    leader, follower = Genie(redis, lease=LEASE_S), Genie(redis, lease=LEASE_S)
    leader.start()
    await lock(leader, "a")
    follower.start()
    file = tmp_path / "file"
    assert genie_cli("store", "export", str(file), redis_url=redis.url).returncode == 0
    follower.send(signal.SIGSTOP)  # otherwise it would lead at once
    try:
        await lock(leader, "b")
        leader.send(signal.SIGTERM)
        assert leader.wait() == 0
        assert genie_cli("store", "import", str(file), "--replace", redis_url=redis.url).returncode == 0
    finally:
        follower.send(signal.SIGCONT)
    assert follower.until("leadership acquired")["held_locks"] == 1
    wire = await Wire.connect(follower.address)
    await wire.request("exclusive:a", queueTimeout=1)
    assert (await wire.expect("released"))["reason"] == "queue-timeout"
    await lock(follower, "b")
    follower.kill()


async def test_a_namespace_can_be_checked_and_exported_under_load(redis: Redis) -> None:
    server = Genie(redis)  # with the default lease: a busy machine may delay the server for longer than LEASE_S
    redis.create_namespace()
    server.start()
    load = subprocess.Popen(  # noqa: ASYNC220
        [*CLI, "bench", "own", "--seconds", "600", "--port", str(server.port)], stdout=subprocess.DEVNULL
    )
    positions = set()
    while len(positions) < 3:
        done = genie_cli("store", "check", "--json", redis_url=redis.url)
        assert (done.returncode, done.stderr) == (0, ""), (done.stdout, done.stderr)
        positions.add(json.loads(done.stdout)["position"])
        exported = genie_cli("store", "export", redis_url=redis.url)
        assert exported.returncode == 0, exported.stderr
        assert json.loads(exported.stdout.splitlines()[-1])["count"] == len(exported.stdout.splitlines()) - 2
    assert load.poll() is None, server.log_so_far()
    load.send_signal(signal.SIGINT)
    load.wait()
    server.kill()


async def test_a_namespace_moves_to_sentinels_and_to_a_cluster(stored: Stored, tmp_path: Path) -> None:
    lines = lines_of(stored)
    file = tmp_path / "file"
    file.write_text("".join(f"{line}\n" for line in lines))
    async with running_sentinels(down_after_ms=LONG_DOWN_AFTER_MS) as sentinels, running_cluster() as cluster:
        for url in (sentinels.url, cluster.url):
            done = await asyncio.to_thread(genie_cli, "store", "import", str(file), redis_url=url)
            assert (done.returncode, done.stdout) == (0, ""), done.stderr
            report = await asyncio.to_thread(genie_cli, "store", "check", "--json", redis_url=url)
            assert json.loads(report.stdout)["sound"]
            exported = await asyncio.to_thread(genie_cli, "store", "export", redis_url=url)
            assert exported.stdout.splitlines()[1:] == lines[1:]


def test_many_records(stored: Stored, empty: Stored, tmp_path: Path) -> None:
    pipeline = stored.client.pipeline()
    for id_ in range(10, 10 + RECORDS):
        pipeline.hset(stored.state, str(id_), LOCK % (f"many/{id_}", id_))
    pipeline.execute()
    stored.batch("7-3", f"60.000 {10**6} {10**6}")
    assert stored.check()["sizes"]["held"] == RECORDS + 2
    lines = lines_of(stored)
    assert len(lines) == RECORDS + 4
    assert imported(empty, lines, tmp_path).returncode == 0
    report = empty.check()
    assert (report["sound"], report["sizes"]["held"]) == (True, RECORDS + 2)
    assert lines_of(empty)[1:] == lines[1:]


def test_the_records_of_these_tests_have_the_format_of_the_server() -> None:
    request = Request(exclusive=("a",))
    request.state, request.fence, request.since, request.since_unix_ms, request.deadline = HELD, 1, 1.0, 1, 60_000
    assert json.loads(LOCK % ("a", 1)).items() <= json.loads(encode(request)).items()
