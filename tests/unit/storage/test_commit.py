"""The encoding of batches, and the acknowledgements that a commit needs."""

from __future__ import annotations

import hiredis
import pytest

from genie.core import LockManager, Release, Request
from genie.storage.redis.commit import _COMMIT, AckPolicy, BatchEncoder, _sha, with_script
from genie.storage.redis.connection import ErrorReply
from genie.storage.redis.keyspace import Keyspace, LeaderEpoch
from genie.storage.redis.primary import Primary
from genie.storage.redis.url import RedisUrl
from genie.storage.store import Batch


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
    assert policy.replies == (1 if command is None else 2)
    assert parse_command(policy.command) == command
    for reply in enough:
        assert policy.unmet(list(reply) if isinstance(reply, tuple) else reply) == ""
    for reply, description in missing.items():
        assert policy.unmet(list(reply) if isinstance(reply, tuple) else reply) == description
    assert policy.unmet(ErrorReply("ERR no")) == "ERR no"


def parse_command(command: bytes) -> list[bytes] | None:
    """Return the parts of an encoded command; None if it is empty."""
    reader = hiredis.Reader()
    reader.feed(command)
    command_parts = reader.gets()
    return command_parts if isinstance(command_parts, list) else None


def encoder() -> BatchEncoder:
    keyspace = Keyspace(Primary(RedisUrl.parse("redis://"), "k"), "n")
    keyspace.epoch = LeaderEpoch(7, "nonce", "{n}:records:7-nonce")
    return BatchEncoder(keyspace)


def test_a_batch_is_encoded_as_one_command() -> None:
    manager, batch_encoder = LockManager(), encoder()
    one, other = Request(exclusive=("a",)), Request(exclusive=("b",))
    for request in (one, other):
        manager.step(request, 0)
    manager.step(Release(one.id), 0)
    head = [b"EVALSHA", _sha(_COMMIT), b"3", b"{n}:meta", b"{n}:records:7-nonce", b"{n}:log", b"7", b"nonce"]
    parts = parse_command(batch_encoder.encode(Batch({one.id: one, other.id: other, 9: None}, 10, 20, 1.5)))
    assert parts is not None
    assert parts[:8] == head
    assert parts[8] == b"1 1.500 10 20"
    assert parts[10:16] == [b"2", b"1", b"", b"9", b"", b"2"]
    assert len(parts) == 17
    following = parse_command(batch_encoder.encode(Batch({}, 10, 20, 2)))
    assert following is not None
    assert following[8:] == [b"2 2.000 10 20", following[9], b"0"]


def test_another_script_changes_only_the_sha_of_an_encoded_batch() -> None:
    sha, batch = _sha(b"another"), encoder().encode(Batch({1: None}))
    changed = with_script(batch, sha)
    assert parse_command(changed) == [sha if part == _sha(_COMMIT) else part for part in parse_command(batch) or []]
    assert changed != batch
    assert with_script(changed, sha) == changed
