"""The keys of a namespace in Redis, and the atomic operations on them.

The tag `{namespace}` in each key puts all keys into one hash slot:

- `{namespace}:log`, a stream: the replication log, with an entry for each batch and each takeover (`log.py`).
- `{namespace}:state:…`, a hash: the checkpointed state, a record by id (`records.py`). Its field `0` keeps the hash from being
  empty.
- `{namespace}:meta`, a hash with the fields `version` (of the format), `epoch`, `nonce`, `node`, `history`, `state` (the key of
  the current state), `checkpoint` and `run_id`: see `Meta`. `node` is empty after the leader has resigned.
- `{namespace}:candidates`, a set: the ids of the nodes that wait while the namespace is empty.
- `{namespace}:positions`, a hash: during an election, the replicated position of each candidate.
- `{namespace}:transfer_request`, a string: which node requests leadership, and how many namespaces it leads. It expires.
- `{namespace}:snapshots`, a set: the keys of all states. A key is added before the state is written, so that an abandoned
  state is found and deleted.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace

from msgspec import DecodeError

from genie.storage.redis.connection import RedisConnection, RedisFailure
from genie.storage.redis.log import (
    MAX_EPOCHS,
    EpochHistory,
    Position,
    decode_ends,
    decode_position,
    encode_ends,
    encode_position,
)
from genie.storage.redis.primary import SCRIPTS, Primary
from genie.storage.redis.records import decode_counters, encode, encode_counters
from genie.storage.store import Batch, LeadershipLost, Node, UnknownFormat, decode_node, encode_node
from genie.tasks import cancel_and_wait

FORMAT_VERSION = 1
"""The version of the stored format: the keys, their fields, the log entries and the records. A server that finds
another version neither leads the namespace nor changes it."""

TRANSFER_REQUEST_TTL_MS = 3_000
"""How long a transfer request is valid unless it is repeated."""
POSITION_TTL_S = 1.0
"""How long a candidate's published position is valid unless it is published again."""
CHUNK = 1000
"""About how many records one call reads or writes. Limited, because Redis serves no other client during a call."""
CHUNK_BYTES = 1 << 20
"""About how many bytes of records one call reads or writes. Limited like `CHUNK`, and because this server serves no client
while it encodes them."""
FIRST_CHUNK = 16
"""How many records the first call of a scan reads, while it does not know how large they are."""

_READ = SCRIPTS.joinpath("read.lua").read_bytes()
_ACQUIRE = SCRIPTS.joinpath("acquire.lua").read_bytes()
_RESIGN = SCRIPTS.joinpath("resign.lua").read_bytes()
_REGISTER_SNAPSHOT = SCRIPTS.joinpath("register_snapshot.lua").read_bytes()
_CHECKPOINT = SCRIPTS.joinpath("checkpoint.lua").read_bytes()
_COLLECT_GARBAGE = SCRIPTS.joinpath("collect_garbage.lua").read_bytes()

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""The valid names of a namespace."""


@dataclass(frozen=True, slots=True)
class LeaderEpoch:
    """One period of leadership."""

    number: int
    """The number of the epoch, which is higher than those of all earlier epochs."""
    nonce: str
    """A random text. It distinguishes two nodes that have chosen the same number."""
    state: str
    """The key of the hash to which the leader writes checkpoints."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How much of the log the checkpointed state contains."""

    position: Position
    """The state contains all changes up to this position, and possibly some later ones."""
    counters: Batch
    """The clock and the counters at that position, as a batch without changes."""

    def encode(self) -> bytes:
        """Encode the checkpoint as `epoch-index`, a space, and the counters."""
        return encode_position(self.position).encode() + b" " + encode_counters(self.counters)

    @classmethod
    def decode(cls, stored: bytes) -> Checkpoint:
        """Decode the result of `encode`."""
        position, _, counters = stored.partition(b" ")
        return cls(decode_position(position), decode_counters(counters))


@dataclass(frozen=True, slots=True)
class Meta:
    """The decoded `meta` key and the end of the log, read at one moment."""

    epoch: LeaderEpoch
    """The epoch of the current or last leader."""
    node: Node | None
    """The current leader. None if the last leader has resigned."""
    position: Position
    """The position of the last log entry, or of the checkpoint if the log was lost."""
    checkpoint: Checkpoint
    before: tuple[Position, ...]
    """The last positions of the earlier epochs, oldest first."""
    has_log: bool = True
    """False if Redis has lost the log, but not the metadata."""
    run_id: str = ""
    """The run of the Redis to which the last takeover or resignation was written. Empty if unknown."""

    @property
    def history(self) -> EpochHistory:
        """The epoch history of the stored state: the earlier epochs and the current position."""
        return EpochHistory((*self.before, self.position))


@dataclass(frozen=True, slots=True)
class Takeover:
    """A new epoch that this node tries to start. It is started if Redis has not changed since this node has read it.

    The epoch continues from the stored state (`checkpoint` is None), a restored snapshot (`base` is None), or an empty
    state.
    """

    epoch: LeaderEpoch
    node: Node | None
    """The leader. None if the epoch has no leader, so that any node can take over at once."""
    observed: Meta | None
    """The metadata that this node has read. None if the namespace was empty, and its log ended with `Keyspace.log_end`."""
    ends: tuple[Position, ...]
    """The last positions of the earlier epochs, oldest first."""
    base: Position | None
    """The position from which the epoch continues. None if the existing log does not lead to the restored snapshot."""
    checkpoint: Checkpoint | None = None
    """The checkpoint of a new state, whose records are already written. None to keep the stored state."""
    record_count: int = 0
    """How many records the new state must have."""
    candidate_id: str | None = None
    """The id of this node among the candidates. If it is not registered any more, Redis has lost everything since the
    namespace was read as empty, and the takeover fails. None if this is not checked."""


def next_chunk(count: int, fields: list[bytes]) -> int:
    """Return how many records the next call of a scan reads, after a call for `count` records has returned these fields and values.

    They have about `CHUNK_BYTES` if they are as large. At most twice as many, because large records may follow a few small ones.
    """
    chunk_bytes = sum(map(len, fields))
    fitting = CHUNK_BYTES * len(fields) // 2 // chunk_bytes if chunk_bytes else CHUNK
    return max(1, min(2 * count, CHUNK, fitting))


class Keyspace:
    """The access of this node to the keys of a namespace."""

    def __init__(self, primary: Primary, name: str) -> None:
        self.primary = primary
        self._prefix = f"{{{name}}}:"  # the braces put all keys into the same hash slot of a cluster
        self.name = name
        """The name of the namespace."""
        self._candidate_id = secrets.token_hex(8)
        """Identifies this node among the candidates."""
        self._publish_count = 0
        """How often this node has published a position."""
        self._rivals: dict[bytes, tuple[bytes, float]] = {}
        """By id of each other candidate, the position that it has published last, as stored, and when this node first
        read it (event-loop time)."""
        self._attempted_restore: LeaderEpoch | None = None
        """The epoch of a snapshot restore whose outcome is unknown. None if there is no such restore."""
        self._attempted_acquisition: LeaderEpoch | None = None
        """The epoch of a call of `acquire_leadership` whose outcome is unknown. None if there is no such call."""
        self.highest_epoch = 0
        """The highest epoch number that this node has read or chosen. A new epoch has a higher number."""
        self.meta = meta_key(name)
        """The key of the hash that describes the leader and the stored state."""
        self.log = self.key("log")
        """The key of the log."""
        self.log_end = ""
        """The id of the last log entry at the last `read`, or empty if there was none. Without `meta` the log is
        useless, but a log that grows shows that a leader is alive."""
        self.epoch = LeaderEpoch(0, "", "")
        """The last epoch that this node led. Its number is 0 if this node has never led."""
        self.history = EpochHistory()
        """The epoch history up to the start of `epoch`."""

    def key(self, name: str) -> str:
        """Return a key of the namespace."""
        return f"{self._prefix}{name}"

    async def read(self) -> Meta | None:
        """Return the metadata with the end of the log, or None if the namespace is empty: new, or lost by Redis.

        Raises UnknownFormat if another version of Genie has written the namespace in a format that this version does
        not know.
        """
        reply = await self.primary.call("EVAL", _READ, 2, self.meta, self.log)
        self.log_end = reply[1].decode()
        return self._decode_meta(reply, asking=self.primary.asking)

    async def watch(self, connection: RedisConnection) -> Meta | None:
        """WATCH the metadata and the log on another connection, then return what `read` returns.

        Redis then rejects the next transaction of the connection if another client has changed them since the read.
        """
        await connection.call("WATCH", self.meta, self.log)
        return self._decode_meta(await connection.call("EVAL", _READ, 2, self.meta, self.log), asking=connection.asking)

    def _decode_meta(self, reply: tuple[list[bytes], bytes], *, asking: bool) -> Meta | None:
        """Decode the reply of `read.lua`: the fields and values of `meta`, and the id of the last log entry.

        Records the number of the epoch in `highest_epoch`. Returns None if `meta` does not exist. With `asking`, a
        missing `meta` raises RedisFailure instead, because the slot is being migrated to the node that replied.
        """
        fields, last_id = reply
        meta = {field.decode(): value for field, value in zip(fields[::2], fields[1::2], strict=True)}
        if not meta:
            if asking:
                raise RedisFailure(f"the slot of {self.meta} is being migrated, and the key has not arrived yet")
            return None
        version = meta.get("version", b"none").decode()
        if version != str(FORMAT_VERSION):
            raise UnknownFormat(
                f"{self.meta} has the format version {version}, and this version of Genie knows {FORMAT_VERSION}: "
                "use the version of Genie that wrote it, or another namespace"
            )
        missing = {"epoch", "nonce", "node", "history", "state", "checkpoint"} - meta.keys()
        if missing:
            raise UnknownFormat(f"{self.meta} lacks {', '.join(sorted(missing))}: restore it from a backup")
        try:
            decoded = _decode_meta_fields(meta, last_id)
        except (ValueError, DecodeError) as error:
            raise UnknownFormat(f"{self.meta}: a field is invalid: {error}; restore it from a backup") from None
        self.highest_epoch = max(self.highest_epoch, decoded.epoch.number)
        return decoded

    async def acquire_leadership(self, node: Node, observed: Meta | None) -> bool:
        """Start a new epoch with `node` as the leader. Afterwards no earlier leader can commit.

        The epoch continues from the position of `observed`, or from an empty state if `observed` is None. Returns False
        if the metadata or the log has changed since `observed` was read: another node has taken over, or the leader has
        committed.
        """
        epoch = self._next_epoch()
        self._attempted_restore = None
        if observed is None:
            no_history = EpochHistory()
            takeover = Takeover(
                epoch,
                node,
                observed,
                ends=no_history.ends,
                base=no_history.position,
                checkpoint=Checkpoint((epoch.number, 0), Batch()),
                candidate_id=self._candidate_id,
            )
        else:
            epoch = replace(epoch, state=observed.epoch.state)
            takeover = Takeover(epoch, node, observed, ends=observed.history.ends, base=observed.position)
        self._attempted_acquisition = epoch
        return await self._acquire(takeover)

    def confirm_acquisition(self, meta: Meta | None) -> bool:
        """Return whether the last call of `acquire_leadership` has succeeded although its reply was lost, and record it if so.

        `meta` must be the first metadata that was read after that call, because another node may have led before a later read.
        """
        attempted, self._attempted_acquisition = self._attempted_acquisition, None
        if meta is None or meta.epoch != attempted:
            return False
        # Otherwise this node would take its own epoch for that of another leader.
        self._on_acquired(meta.epoch, meta.before)
        return True

    async def register_candidate(self) -> bool:
        """Register this node as a candidate that waits while the namespace is empty.

        Return False if it was registered before. So a repeated call returns True only if Redis has lost data since.
        """
        added_count = await self.primary.write("SADD", self.key("candidates"), self._candidate_id)
        return bool(added_count)

    async def publish_position_and_compare(self, position: Position) -> bool:
        """Publish this candidate's replicated position, and return whether another candidate has published a later position.

        Other candidates ignore the position if it is not published again within `POSITION_TTL_S`. Each publication has a new
        count, so that each changes the stored value. Other nodes measure the time since they first read the value, so clocks of
        different nodes are not compared.
        """
        now = asyncio.get_running_loop().time()
        self._publish_count += 1
        own_value = f"{encode_position(position)} {self._publish_count}"
        await self.primary.write("HSET", self.key("positions"), self._candidate_id, own_value)
        stored = await self.primary.call("HGETALL", self.key("positions"))
        values = dict(zip(stored[::2], stored[1::2], strict=True))
        values.pop(self._candidate_id.encode(), None)
        rivals: dict[bytes, tuple[bytes, float]] = {}
        for rival, value in values.items():
            last_value, first_read_at = self._rivals.get(rival, (b"", now))
            rivals[rival] = (value, first_read_at if value == last_value else now)
        self._rivals = rivals
        for value, first_read_at in rivals.values():
            with suppress(ValueError):  # a value that no server writes
                if now - first_read_at < POSITION_TTL_S and decode_position(value.partition(b" ")[0]) > position:
                    return True
        return False

    async def request_transfer(self, address: str, count: int) -> None:
        """Request the transfer of this namespace to the node at `address`, which leads `count` namespaces.

        The leader polls for the request, which expires after `TRANSFER_REQUEST_TTL_MS`.
        """
        await self.primary.write(
            "SET", self.key("transfer_request"), f"{count} {address}", "PX", TRANSFER_REQUEST_TTL_MS
        )

    async def read_transfer_request(self) -> tuple[str, int] | None:
        """Return the address of the node that requests the namespace, and how many namespaces it leads.

        Returns None if no node requests the namespace, or if no server writes such a request.
        """
        stored = await self.primary.call("GET", self.key("transfer_request"))
        if stored is None:
            return None
        try:
            count, _, address = stored.decode().partition(" ")
            return address, int(count)
        except ValueError:
            return None

    async def delete_transfer_request(self) -> None:
        """Delete the transfer request, if there is one."""
        await self.primary.call("UNLINK", self.key("transfer_request"))

    async def scan_records(self) -> AsyncIterator[dict[bytes, bytes]]:
        """Yield all records in chunks, each a map from id to encoded record.

        The leader may commit during the scan. So a record may be yielded twice, with values from different moments.
        Raises RedisFailure if Redis has lost the state.
        """
        meta = await self.read()
        if meta is None:
            return
        state = meta.epoch.state
        exists, count = False, FIRST_CHUNK
        # Redis reads the next chunk while the caller decodes one, which takes as long: a load takes a third less
        # (measured).
        scan: asyncio.Task[tuple[bytes, list[bytes]]] | None = asyncio.create_task(self._scan(state, b"0", count))
        try:
            while scan is not None:
                cursor, fields = await scan
                count = next_chunk(count, fields)
                scan = None if cursor == b"0" else asyncio.create_task(self._scan(state, cursor, count))
                await asyncio.sleep(0)  # sends the command
                records = dict(zip(fields[::2], fields[1::2], strict=True))
                exists |= records.pop(b"0", None) is not None  # every state has this field
                yield records
        finally:
            await cancel_and_wait(scan)
        if not exists:
            latest = await self.read()
            # If another state is current, a snapshot was restored during the scan, and the caller loads again.
            if latest is not None and latest.epoch.state == state:
                raise RedisFailure(f"Redis has lost {state}, the state of the last checkpoint")

    async def _scan(self, state: str, cursor: bytes, count: int) -> tuple[bytes, list[bytes]]:
        """Return the next cursor of a scan, `0` at its end, and about `count` records: alternating fields and values."""
        next_cursor, fields = await self.primary.read([state, self.meta, self.log], "HSCAN", cursor, "COUNT", count)
        return next_cursor, fields

    async def restore_snapshot(
        self, node: Node | None, state: Batch, history: EpochHistory, log_end: str | None = None
    ) -> None:
        """Write the in-memory state with its epoch history to a Redis that has lost commits, in a new epoch.

        `node` is the leader of the epoch, or None so that any node can take over at once. If the namespace has no
        metadata and `log_end` is not None, the log must end with the entry of this id.

        The records are written to a new snapshot key. Finally `meta` is switched to the new key, so a crash in between
        leaves the old state in place. Raises LeadershipLost if another node leads, or if the log has another end. After
        any other error the caller can call `restore_snapshot` again.
        """
        meta = await self.read()
        if meta is not None and meta.epoch == self._attempted_restore:
            self._on_acquired(meta.epoch, meta.before)  # the last attempt succeeded, and only its reply was lost
            await self._finish_restore()
            return
        if meta is not None and not history.contains(meta.position):
            raise LeadershipLost(f"{self.meta} has another leader")
        if meta is None and log_end not in (None, self.log_end):
            raise LeadershipLost(f"{self.log} has changed, so another server writes it")
        self._attempted_restore = epoch = self._next_epoch()
        await self._register_snapshot(epoch)
        record_count = await self._write_records(epoch.state, state)
        must_be_candidate = meta is None and log_end is not None
        takeover = Takeover(
            epoch,
            node,
            meta,
            ends=history.ends,
            base=None,
            checkpoint=Checkpoint((epoch.number, 0), state),
            record_count=record_count,
            candidate_id=self._candidate_id if must_be_candidate else None,
        )
        if not await self._acquire(takeover):
            raise LeadershipLost(f"{self.meta} changed while the snapshot was written")
        await self._finish_restore()

    async def _write_records(self, key: str, state: Batch) -> int:
        """Write all requests and retained replies of a state to the hash `key`, in chunks.

        Return how many there are.
        """
        count = chunk_bytes = 0
        fields: list[object] = []  # alternating ids and records
        for id_, change in state.changes.items():
            if change is None:
                continue
            if len(fields) >= 2 * CHUNK or chunk_bytes >= CHUNK_BYTES:
                await self.primary.write("HSET", key, *fields)
                fields, chunk_bytes = [], 0
            record = encode(change)
            fields += id_, record
            chunk_bytes += len(record)
            count += 1
        if fields:
            await self.primary.write("HSET", key, *fields)
        return count

    async def write_checkpoint(
        self,
        last: Position,
        new: Checkpoint,
        attempt: int,
        part: int,
        deleted: list[bytes],
        written: dict[bytes, bytes],
        *,
        is_last_part: bool,
    ) -> bytes:
        """Write a part of the changes between the positions `last` and `new`, and return the status.

        `deleted` are ids, and `written` are records by id. The last part also moves the checkpoint. Attempts to write a
        checkpoint, and the parts of an attempt, are numbered from 1.

        The status is `ok`, or the reason why nothing was changed: `other` if another node leads, `moved` if the last
        checkpoint is not at `last`, `late` if a later part was written or the previous part was not, `lost` if Redis
        lacks the log up to `new`, `no state` if Redis has lost the state.
        """
        arguments: list[object] = [self.epoch.number, self.epoch.nonce]
        arguments += encode_position(last), attempt, part, *new.position
        arguments.append(new.encode() if is_last_part else b"")
        arguments += len(deleted), *deleted
        for id_and_record in written.items():
            arguments += id_and_record
        keys = [self.meta, self.log, self.epoch.state]
        return bytes(await self.primary.eval(_CHECKPOINT, keys, *arguments))

    async def _finish_restore(self) -> None:
        """Delete the former state and abandoned snapshots, then forget the attempt.

        The order matters: if deleting fails, the next `restore_snapshot` must recognize that the attempt has succeeded.
        """
        await self.collect_garbage()
        self._attempted_restore = None

    async def resign(self, last_index: int, batch: bytes) -> None:
        """Store that the namespace has no leader, in a log entry with the encoded batch `batch`, which has the last counters.

        `last_index` is the index of the last batch that this node has sent. Does nothing if this Redis lacks that batch.
        Otherwise the resignation would get the index of the missing batch, which followers may have read from another Redis.
        """
        epoch = self.epoch.number
        last_id, resignation_id = encode_position((epoch, last_index)), encode_position((epoch, last_index + 1))
        arguments = (epoch, self.epoch.nonce, last_id, resignation_id, batch, self.primary.run.id)
        await self.primary.eval(_RESIGN, [self.meta, self.log], *arguments)

    async def collect_garbage(self) -> None:
        """Delete the keys of the election, and all snapshots except the current one."""
        # Separate calls, because the two keys may be on different nodes during a slot migration.
        for key in (self.key("candidates"), self.key("positions")):
            await self.primary.call("UNLINK", key)
        snapshots = sorted(key.decode() for key in await self.primary.call("SMEMBERS", self.key("snapshots")))
        if snapshots != [self.epoch.state]:
            keys = [self.meta, self.key("snapshots"), *snapshots]
            await self.primary.eval(_COLLECT_GARBAGE, keys, self.epoch.number, self.epoch.nonce)

    async def _acquire(self, takeover: Takeover) -> bool:
        """Start the epoch of `takeover`. Return False if Redis has changed since this node has observed it.

        Raises RedisFailure if Redis has lost records of the new state.
        """
        epoch, observed, checkpoint = takeover.epoch, takeover.observed, takeover.checkpoint
        # The epoch, the nonce and the last log id that Redis must still have. An empty string stands for a missing
        # value.
        expected: tuple[object, ...] = ("", "", self.log_end)
        if observed is not None:
            log_end = encode_position(observed.position) if observed.has_log else ""
            expected = (observed.epoch.number, observed.epoch.nonce, log_end)
        await self._register_snapshot(epoch)
        ends, candidate_id = takeover.ends[-MAX_EPOCHS:], takeover.candidate_id
        keys = [self.meta, self.log, epoch.state]
        if candidate_id is not None:  # a key that may not exist would make the script fail during a slot migration
            keys.append(self.key("candidates"))
        status = await self.primary.eval(
            _ACQUIRE,
            keys,
            *(epoch.number, epoch.nonce, *expected, encode_node(takeover.node), FORMAT_VERSION),
            "" if takeover.base is None else encode_position(takeover.base),
            encode_ends(ends),
            b"" if checkpoint is None else checkpoint.encode(),
            takeover.record_count,
            candidate_id or "",
            self.primary.run.id,
        )
        if status == b"lost":
            raise RedisFailure(f"Redis has lost records of the snapshot {epoch.state} while it was written")
        if status == b"ok":
            self._on_acquired(epoch, ends)
        return bool(status == b"ok")

    async def _register_snapshot(self, epoch: LeaderEpoch) -> None:
        """Register the snapshot key of `epoch` before it is written, so that the next leader deletes it if this node crashes."""
        # With the key `meta`, the script fails on a node that has only one of the keys during the migration of a hash
        # slot.
        await self.primary.eval(_REGISTER_SNAPSHOT, [self.meta, self.key("snapshots")], epoch.state)

    def _on_acquired(self, epoch: LeaderEpoch, before: tuple[Position, ...]) -> None:
        """Set the epoch that this node leads. `before` are the last positions of the earlier epochs."""
        self.epoch = epoch
        self._attempted_acquisition = None
        self.history = EpochHistory((*before, (epoch.number, 0)))

    def _next_epoch(self) -> LeaderEpoch:
        """Return a new epoch, whose number is higher than every number that this node has read or chosen.

        The number is the Unix time in µs, or one more than the highest number if the clock is slow. So the number is
        also new if Redis has lost the last epoch, and two partitioned nodes are unlikely to choose the same number.
        """
        self.highest_epoch = max(self.highest_epoch + 1, time.time_ns() // 1000)
        nonce = secrets.token_hex(8)
        return LeaderEpoch(self.highest_epoch, nonce, self.key(f"state:{self.highest_epoch}-{nonce}"))


def _decode_meta_fields(meta: dict[str, bytes], last_id: bytes) -> Meta:
    """Decode the fields of `meta`. `last_id` is the id of the last log entry, or empty if the log was lost.

    Raises ValueError or DecodeError if a field is invalid.
    """
    epoch = LeaderEpoch(int(meta["epoch"]), meta["nonce"].decode(), meta["state"].decode())
    checkpoint = Checkpoint.decode(meta["checkpoint"])
    before = decode_ends(meta["history"])  # the last positions of the earlier epochs
    position = decode_position(last_id)
    if not last_id:  # the state is that of the checkpoint
        position = checkpoint.position
        before = EpochHistory(before).up_to(position).ends[:-1]
    return Meta(
        epoch,
        decode_node(meta["node"]),
        position,
        checkpoint,
        before,
        has_log=bool(last_id),
        run_id=meta.get("run_id", b"").decode(),
    )


def meta_key(name: str) -> str:
    """Return the `meta` key of a namespace. Raises ValueError if the name is invalid."""
    if not NAME.fullmatch(name):
        raise ValueError(f"a namespace must be 1 to 128 letters, digits or any of _.:- , not {name!r}")
    return f"{{{name}}}:meta"
