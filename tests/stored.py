"""What is stored in Redis, read without the code under test."""

from __future__ import annotations

from redises.group import until
from servers import Redis


def stored_records(redis: Redis, namespace: str = "genie") -> dict[int, bytes]:
    """Return the records that a new leader would read: those of the last checkpoint, changed by the log after it.

    The leader may write a checkpoint meanwhile: `meta` is read first and the log last, and its entries are absolute.
    """
    meta = redis.call("HGETALL", f"{{{namespace}}}:meta")
    records = redis.call("HGETALL", meta[b"state"].decode())
    checkpoint = meta[b"checkpoint"].split()[0].decode()
    last = checkpoint
    for position, entry in redis.call("XRANGE", f"{{{namespace}}}:log", f"({checkpoint}", "+"):
        epoch, index = last.split("-")
        if b"base" in entry:
            assert entry[b"base"].decode() == last, f"{position} does not continue {last}"
        else:
            assert position.decode() == f"{epoch}-{int(index) + 1}", f"{position} does not follow {last}"
            for change in entry[b"batch"].split(b"\n")[1:]:
                id_, _, record = change.partition(b" ")
                if record:
                    records[id_] = record
                else:
                    records.pop(id_, None)
        last = position.decode()
    return {int(id_): record for id_, record in records.items() if id_ != b"0"}


def last_position(redis: Redis, namespace: str = "genie") -> tuple[int, int]:
    """Return the epoch and the index of the last log entry."""
    ((position, _),) = redis.call("XREVRANGE", f"{{{namespace}}}:log", "+", "-", "COUNT", "1")
    epoch, index = position.decode().split("-")
    return int(epoch), int(index)


def checkpoint_position(redis: Redis, namespace: str = "genie") -> tuple[int, int]:
    """Return the epoch and the index of the last log entry that the checkpoint contains."""
    epoch, index = redis.call("HGET", f"{{{namespace}}}:meta", "checkpoint").split()[0].decode().split("-")
    return int(epoch), int(index)


async def checkpoint_written(redis: Redis, namespace: str = "genie") -> tuple[int, int]:
    """Wait until a checkpoint contains the log up to its present end; return its position."""
    end = last_position(redis, namespace)

    async def is_written() -> bool:
        return checkpoint_position(redis, namespace) >= end

    await until("a checkpoint is written", is_written)
    return checkpoint_position(redis, namespace)
