"""The encoding of commits, and the acknowledgements that a commit needs."""

from __future__ import annotations

import hiredis
import pytest

from genie.storage.redis.commit import LARGE_BATCH_BYTES, TRIM_INTERVAL, AckPolicy, CommitEncoder
from genie.storage.redis.connection import ErrorReply
from genie.storage.redis.keyspace import Keyspace, LeaderEpoch
from genie.storage.redis.log import MAX_LOG_BYTES, EpochHistory, Position
from genie.storage.redis.primary import ALLOW_OOM_SHEBANG, Primary
from genie.storage.redis.url import RedisUrl


@pytest.mark.parametrize(
    ("replicas", "fsync", "command", "enough", "missing"),
    [
        (0, False, None, [], {}),
        (2, False, [b"WAIT", b"2", b"1000"], [2, 3], {0: "confirmed by 0 of 2 replicas", 1: "confirmed by 1 of 2 replicas"}),
        (
            0,
            True,
            [b"WAITAOF", b"1", b"0", b"10"],
            [(1, 0), (1, 5)],
            {(0, 0): "not on the disk of the master", (0, 5): "not on the disk of the master"},
        ),
        (
            2,
            True,
            [b"WAITAOF", b"1", b"2", b"10"],
            [(1, 2), (1, 3)],
            {
                (1, 1): "confirmed by 1 of 2 replicas",
                (0, 2): "not on the disk of the master, and confirmed by 2 of 2 replicas",
                (0, 0): "not on the disk of the master, and confirmed by 0 of 2 replicas",
            },
        ),
    ],
)  # fmt: skip
def test_missing_acknowledgements_are_described(
    replicas: int,
    fsync: bool,
    command: list[bytes] | None,
    enough: list[int | tuple[int, int]],
    missing: dict[int | tuple[int, int], str],
) -> None:
    policy = AckPolicy(replicas, fsync=fsync)
    assert parse_commands(policy.first_wait) == ([] if command is None else [command])
    for reply in enough:
        assert policy.missing_acks(list(reply) if isinstance(reply, tuple) else reply) == ""
    for reply, description in missing.items():
        assert policy.missing_acks(list(reply) if isinstance(reply, tuple) else reply) == description
    assert policy.missing_acks(ErrorReply("ERR no")) == "ERR no"


def parse_commands(encoded: bytes) -> list[list[bytes]]:
    """Return the encoded commands, each as the list of its parts."""
    reader = hiredis.Reader()
    reader.feed(encoded)
    commands: list[list[bytes]] = []
    while command := reader.gets():
        assert isinstance(command, list)
        commands.append(command)
    return commands


def encoder(checkpointed: Position = (0, 0)) -> CommitEncoder:
    keyspace = Keyspace(Primary(RedisUrl.parse("redis://"), "k"), "n")
    keyspace.epoch = LeaderEpoch(7, "nonce", "{n}:state:7-nonce")
    keyspace.history = EpochHistory(((3, 50), (5, 700), (7, 0)))
    commits = CommitEncoder(keyspace)
    commits.checkpoint = checkpointed
    return commits


@pytest.mark.parametrize("batch", [b"1.500 10 20", b"0 1 1\n7 {}\n8", "ü€\r\n$".encode(), b""])
def test_a_commit_is_a_transaction_with_one_xadd(batch: bytes) -> None:
    command, reply = encoder().encode(12, batch)
    assert parse_commands(command) == [
        [b"MULTI"],
        [b"XADD", b"{n}:log", b"NOMKSTREAM", b"7-12", b"batch", batch],
        [b"EXEC"],
        [b"WATCH", b"{n}:meta", b"{n}:log"],
    ]
    reader = hiredis.Reader()
    reader.feed(reply)
    assert [reader.gets() for _ in range(5)] == [b"OK", b"QUEUED", [b"7-12"], b"OK", False]


@pytest.mark.parametrize(
    ("checkpointed", "first_kept"),
    [
        ((0, 0), b"0-0"),  # not known yet
        ((5, 99), b"5-99"),  # a checkpoint of an earlier leader
        ((7, 200), b"7-200"),
        ((7, 900), b"7-512"),  # followers may still need what follows
    ],
)
def test_the_log_is_trimmed_up_to_the_checkpoint_or_the_retention(checkpointed: Position, first_kept: bytes) -> None:
    commits = encoder(checkpointed)
    batch = b"x" * (MAX_LOG_BYTES // 512)
    for index in range(1, 1024):
        xadd = parse_commands(commits.encode(index, batch)[0])[1]
        assert (b"MINID" in xadd) == (index % TRIM_INTERVAL == 0)
    (_, xadd, _, _) = parse_commands(commits.encode(1024, batch)[0])
    assert xadd == [b"XADD", b"{n}:log", b"NOMKSTREAM", b"MINID", b"~", first_kept, b"7-1024", b"batch", batch]


def test_the_entries_of_the_former_leader_are_retained_and_those_of_its_predecessors_are_trimmed() -> None:
    """Followers may need the entries of the former leader, whose size is unknown, but not those of all leaders."""
    commits = encoder(checkpointed=(7, TRIM_INTERVAL))
    for index in range(1, TRIM_INTERVAL):
        commits.encode(index, b"x")
    assert parse_commands(commits.encode(TRIM_INTERVAL, b"x")[0])[1][3:6] == [b"MINID", b"~", b"5-0"]


def test_each_large_commit_trims_the_log() -> None:
    commits = encoder(checkpointed=(7, 1000))
    for index in range(1, 1000):
        xadd = parse_commands(commits.encode(index, b"x" * LARGE_BATCH_BYTES)[0])[1]
        first_kept = int(xadd[5].partition(b"-")[2])
        assert (index - first_kept) * LARGE_BATCH_BYTES <= MAX_LOG_BYTES + LARGE_BATCH_BYTES or xadd[5] == b"5-0"
    assert first_kept > 0


def test_a_batch_that_is_sent_again_is_counted_once() -> None:
    """Otherwise a retry of a large batch would shorten the log that is retained for followers."""
    commits = encoder((7, 2000))
    batch = b"x" * (MAX_LOG_BYTES // 512)
    for index in range(1, 1024):
        for _ in range(3):
            commits.encode(index, batch)
    assert b"7-512" in commits.encode(1024, batch)[0]


def test_a_redis_out_of_memory_gets_a_script_that_continues_the_last_batch() -> None:
    script, unwatch, watch = parse_commands(encoder().encode_allowing_oom(12, b"0 1 1\n7"))
    assert script[0] == b"EVAL"
    assert script[1].startswith(ALLOW_OOM_SHEBANG)
    assert script[2:] == [b"2", b"{n}:log", b"{n}:meta", b"7-11", b"7-12", b"0 1 1\n7", b"0-0"]
    assert (unwatch, watch) == ([b"UNWATCH"], [b"WATCH", b"{n}:meta", b"{n}:log"])


def test_a_touch_writes_without_effect_and_watches_again() -> None:
    """WAIT covers only writes of its own connection: the nonce is written again, by the same kind of transaction."""
    assert parse_commands(encoder().touch) == [
        [b"MULTI"],
        [b"HSET", b"{n}:meta", b"nonce", b"nonce"],
        [b"EXEC"],
        [b"WATCH", b"{n}:meta", b"{n}:log"],
    ]
