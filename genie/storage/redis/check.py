"""Checks one namespace without changing it: the metadata, the log, the checkpoint, the records and the recovered locks.

During the check a leader may commit, write a checkpoint and trim the log. So the check reads in the order of a recovery
(`replica.py`): the metadata, the state, the metadata again, then the log up to its end. If the log was trimmed beyond
the checkpoint that was read, or a snapshot was restored, the check starts again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

from msgspec import DecodeError, Struct, field

from genie.core import HELD, Request
from genie.core.invariants import find_violations
from genie.storage.redis.connection import ErrorReply, RedisFailure
from genie.storage.redis.keyspace import FIRST_CHUNK, Keyspace, Meta, meta_key, next_chunk
from genie.storage.redis.log import MAX_READ_ENTRIES, Position, decode_position, encode_position
from genie.storage.redis.primary import Primary
from genie.storage.redis.records import RecordDecoder, decode_counters, split_batch
from genie.storage.redis.url import RedisUrl
from genie.storage.store import Batch, Change, RetainedReply, UnknownFormat, decode_node

MAX_FINDINGS = 20
"""How many findings of each part are reported. The report has the number of omitted findings."""
MAX_ATTEMPTS = 10
"""How many attempts a check makes. An attempt fails if the leader trims the log or restores a snapshot during the
attempt."""


# -- The report ---------------------------------------------------------------------------------------


class Finding(Struct, frozen=True):
    """One violation. `part` is `meta`, `epochs`, `log`, `checkpoint`, `records` or `locks`."""

    part: str
    message: str


class Leader(Struct, rename="camel"):
    """The current or last leader, which may act for `lease_ms` after its last commit."""

    address: str
    lease_ms: int


class Counters(Struct, rename="camel"):
    """The clock (ms) and the counters of the lock manager."""

    clock_ms: float
    next_id: int
    next_fence: int


class Sizes(Struct, rename="camel"):
    """The size of a namespace. Memory is in bytes, or None if Redis does not report it."""

    log_entries: int = 0
    log_bytes: int = 0
    """The size of all batches in the log."""
    log_memory: int | None = None
    state_records: int = 0
    """The number of records in the checkpointed state."""
    state_memory: int | None = None
    held: int = 0
    """The number of held requests."""
    waiting: int = 0
    """The number of waiting requests."""
    retained_replies: int = 0


class Report(Struct, rename="camel"):
    """The result of a check."""

    namespace: str
    sound: bool = True
    """True if there are no findings."""
    findings: list[Finding] = field(default_factory=list)
    omitted_findings: int = 0
    """The number of findings beyond `MAX_FINDINGS` of a part, which are not in `findings`."""
    version: str | None = None
    """The version of the stored format. None if the field is missing."""
    epoch: int | None = None
    leader: Leader | None = None
    """None if the last leader has resigned."""
    position: str | None = None
    """The position of the last log entry, `epoch-index`."""
    checkpoint: str | None = None
    """The position of the checkpoint."""
    counters: Counters | None = None
    abandoned_states: list[str] = field(default_factory=list)
    """Keys of states that a crashed leader left. They are no finding, because the next leader deletes them."""
    sizes: Sizes = field(default_factory=Sizes)


async def check_namespace(url: str, namespace: str) -> Report | None:
    """Return the report on a namespace, or None if Redis has no key of it.

    Raises RedisFailure if Redis is unavailable.
    """
    primary = Primary(RedisUrl.parse(url), meta_key(namespace))
    try:
        for _ in range(MAX_ATTEMPTS):
            with suppress(_Changed):  # the next attempt starts again
                return await _Check(primary, namespace).run()
    finally:
        primary.drop()
    raise RedisFailure(f"the namespace {namespace!r} changes faster than it can be read, repeat the check")


# -- The check ----------------------------------------------------------------------------------------


class _Changed(Exception):
    """The namespace has changed so much that the check must start again: the log was trimmed beyond the checkpoint that
    was read, or another state is current.
    """


class _Unreadable(Exception):
    """A violation prevents all further checks."""


class _Check:
    """One attempt to check a namespace."""

    def __init__(self, primary: Primary, namespace: str) -> None:
        self._primary = primary
        self._keyspace = Keyspace(primary, namespace)
        self._report = Report(namespace)
        self._decoder = RecordDecoder()
        self._counts: Counter[str] = Counter()
        """The number of findings of each part."""

    async def run(self) -> Report | None:
        """Check everything, and return the report, or None if the namespace has neither metadata nor a log.

        Raises _Changed if the check must start again.
        """
        report = self._report
        if not await self._primary.call("EXISTS", self._keyspace.meta, self._keyspace.log):
            return None
        with suppress(_Unreadable):
            await self._check_content()
        report.sound = not report.findings
        return report

    def _add_finding(self, part: str, message: str) -> None:
        """Report a violation in one part of the namespace. Beyond `MAX_FINDINGS` of a part, only count it."""
        self._counts[part] += 1
        if self._counts[part] <= MAX_FINDINGS:
            self._report.findings.append(Finding(part, message))
        else:
            self._report.omitted_findings += 1

    async def _check_content(self) -> None:
        """Check the state and the log, then the locks that a recovery would find."""
        meta = await self._read_meta()
        self._report_meta(meta)
        records = await self._read_state(meta)
        latest = await self._read_meta()
        if latest.epoch.state != meta.epoch.state:  # a snapshot was restored meanwhile
            raise _Changed
        log = _LogCheck(meta, self._add_finding)
        await self._read_log(log, latest)
        self._report_meta(latest)
        self._check_epochs(latest, log)
        recovered = self._decode_state(records) | log.new_changes
        changes = {id_: recovered[id_] for id_ in sorted(recovered)}
        counters = log.new_counters or meta.checkpoint.counters
        self._report.counters = Counters(counters.clock_ms, counters.next_id, counters.next_fence)
        self._check_locks(changes, counters)
        await self._report_keys(latest)

    async def _read_meta(self) -> Meta:
        """Return the metadata. If it is missing or cannot be decoded, add a finding and raise _Unreadable."""
        try:
            version = await self._primary.call("HGET", self._keyspace.meta, "version")
            self._report.version = None if version is None else version.decode(errors="replace")
            meta = await self._keyspace.read()
        except UnknownFormat as error:
            self._add_finding("meta", str(error))
        except ErrorReply as error:
            if "WRONGTYPE" not in str(error):  # not `error.code`: the error of a script has this code in its message
                raise
            self._add_finding("meta", f"a key has another type: {error}")
        else:
            if meta is not None:
                return meta
            self._add_finding("meta", "the log exists, but the metadata is missing: Redis has lost a key")
        raise _Unreadable

    def _report_meta(self, meta: Meta) -> None:
        """Set the fields of the report that come from the metadata."""
        report, node = self._report, meta.node
        report.epoch = meta.epoch.number
        report.leader = None if node is None else Leader(node.address, node.lease_ms)
        report.position = encode_position(meta.position)
        report.checkpoint = encode_position(meta.checkpoint.position)

    # -- reading ------------------------------------------------------------------------------------------

    async def _read_state(self, meta: Meta) -> dict[bytes, bytes]:
        """Return the records of the checkpointed state by id.

        If the state is missing, or is not a hash, add a finding and return no records.
        """
        state = meta.epoch.state
        keys = [state, self._keyspace.meta, self._keyspace.log]
        redis_type = (await self._primary.read(keys, "TYPE")).decode()
        if redis_type == "none":  # there is no such key
            if (await self._read_meta()).epoch.state != state:
                raise _Changed
            self._add_finding("checkpoint", f"the state {state} is missing: Redis has lost a key")
            return {}
        if redis_type != "hash":
            self._add_finding("checkpoint", f"the state is a {redis_type} and must be a hash: {state}")
            return {}
        records: dict[bytes, bytes] = {}
        cursor, count = None, FIRST_CHUNK
        while cursor != b"0":
            cursor, fields = await self._primary.read(keys, "HSCAN", cursor or b"0", "COUNT", count)
            count = next_chunk(count, fields)
            records.update(zip(fields[::2], fields[1::2], strict=True))
        records.pop(b"0", None)  # the field that keeps the hash from being empty
        self._report.sizes.state_records = len(records)
        return records

    async def _read_log(self, log: _LogCheck, latest: Meta) -> None:
        """Pass the log up to the position of `latest` to `log`.

        Raises _Changed if the leader has trimmed unread entries.
        """
        if not latest.has_log:
            self._add_finding("log", "the log is missing: Redis has lost a key, and the commits after the checkpoint")
            return
        end = encode_position(latest.position)
        read_up_to: str | None = None
        while read_up_to != end:
            start = "-" if read_up_to is None else f"({read_up_to}"  # `(` excludes the entry itself
            entries = await self._primary.call("XRANGE", self._keyspace.log, start, end, "COUNT", MAX_READ_ENTRIES)
            if not entries:  # the log was replaced, or its slot is being migrated
                raise _Changed
            decoded = [
                (decode_position(id_), dict(zip(fields[::2], fields[1::2], strict=True))) for id_, fields in entries
            ]
            first_position, first_values = decoded[0]
            # If the leader has trimmed unread entries, check again from the start. Otherwise `add` reports what is missing.
            is_trimmed = not log.continues(first_position, first_values) and await self._log_begins_at(first_position)
            if is_trimmed and (read_up_to is not None or await self._has_moved_checkpoint(log.meta)):
                raise _Changed
            for position, values in decoded:
                log.add(position, values, self._decoder)
            read_up_to = entries[-1][0].decode()
        self._report.sizes.log_entries, self._report.sizes.log_bytes = log.entry_count, log.batch_bytes

    async def _has_moved_checkpoint(self, meta: Meta) -> bool:
        """Return whether the leader has written a checkpoint since `meta` was read, after which it may have trimmed the log."""
        return (await self._read_meta()).checkpoint.position != meta.checkpoint.position

    async def _log_begins_at(self, position: Position) -> bool:
        """Return whether the log has entries, and none before `position`."""
        oldest = await self._primary.call("XRANGE", self._keyspace.log, "-", "+", "COUNT", 1)
        return bool(oldest) and decode_position(oldest[0][0]) >= position

    async def _report_keys(self, meta: Meta) -> None:
        """Report the abandoned states, and the memory of the state and the log."""
        for key in sorted(await self._primary.call("SMEMBERS", self._keyspace.key("snapshots"))):
            if key.decode() != meta.epoch.state and await self._primary.call("EXISTS", key):
                self._report.abandoned_states.append(key.decode())
        with suppress(ErrorReply):  # the Redis user may not run the command
            self._report.sizes.log_memory = await self._primary.call("MEMORY", "USAGE", self._keyspace.log)
            self._report.sizes.state_memory = await self._primary.call("MEMORY", "USAGE", meta.epoch.state)

    # -- judging ------------------------------------------------------------------------------------------

    def _check_epochs(self, meta: Meta, log: _LogCheck) -> None:
        """Check that the history, the checkpoint and the takeovers of the log agree."""
        ends = meta.history.ends
        if any(first >= second for first, second in pairwise(ends)):
            self._add_finding("epochs", f"the history is not ascending: {' '.join(map(encode_position, ends))}")
        checkpoint = meta.checkpoint.position
        if not meta.history.contains(checkpoint):
            self._add_finding("checkpoint", f"the checkpoint {encode_position(checkpoint)} is not on the history")
        if meta.has_log:
            self._check_current_epoch(meta, log)
        for epoch, base in log.bases.items():
            expected_base = max(((number, index) for number, index in ends if number < epoch), default=(0, 0))
            # (0, 0) is the base of a restored snapshot, and precedes the first epoch in the history.
            if base != expected_base and (0, 0) not in (base, expected_base):
                self._add_finding(
                    "epochs",
                    f"epoch {epoch} continues from {encode_position(base)} in the log, "
                    f"and from {encode_position(expected_base)} in the history",
                )

    def _check_current_epoch(self, meta: Meta, log: _LogCheck) -> None:
        """Check that the metadata and the end of the log agree on the epoch and its leader."""
        epoch = meta.epoch.number
        if meta.position[0] != epoch:
            self._add_finding("epochs", f"the log ends in epoch {meta.position[0]}, and the metadata has {epoch}")
        if log.leader is not None and log.last_epoch == epoch:
            leader = None if log.has_resigned else decode_node(log.leader)
            if leader != meta.node:
                self._add_finding("epochs", f"the metadata names another leader than the takeover {epoch}-0")

    def _decode_state(self, records: dict[bytes, bytes]) -> dict[int, Change]:
        """Return the decoded records of the state by id. For a record that cannot be decoded, add a finding."""
        changes: dict[int, Change] = {}
        for id_, record in records.items():
            try:
                changes[int(id_)] = self._decoder.decode(int(id_), record)
            except (UnknownFormat, DecodeError, ValueError) as error:
                self._add_finding("records", f"the record {id_.decode(errors='replace')} of the state: {error}")
        return changes

    def _check_locks(self, changes: dict[int, Change], counters: Batch) -> None:
        """Set the numbers of locks in the report, and check the locks against each other and against the counters."""
        requests = [change for change in changes.values() if isinstance(change, Request)]
        sizes = self._report.sizes
        sizes.held = sum(request.state is HELD for request in requests)
        sizes.waiting = len(requests) - sizes.held
        sizes.retained_replies = sum(isinstance(change, RetainedReply) for change in changes.values())
        for violation in find_counter_violations(changes, counters):
            self._add_finding("locks", violation)
        for violation in find_violations(requests):
            self._add_finding("locks", violation)


def find_counter_violations(changes: dict[int, Change], counters: Batch) -> list[str]:
    """Return a sentence for each id and fencing token that could be assigned again, because its counter is too low."""
    violations = []
    for id_, change in changes.items():
        if change is not None and not 0 < id_ < counters.next_id:
            violations.append(f"the id {id_} is not below the next id, {counters.next_id}")
        if isinstance(change, Request) and change.state is HELD and not 0 < change.fence < counters.next_fence:
            violations.append(
                f"the fencing token {change.fence} of request {id_} is not below the next one, {counters.next_fence}"
            )
    return violations


class _LogCheck:
    """Checks the log entry by entry, and collects the changes after the checkpoint of `meta`."""

    def __init__(self, meta: Meta, add_finding: Callable[[str, str], None]) -> None:
        self.meta = meta
        self._add_finding = add_finding
        self._previous: Position | None = None
        """The position of the previous entry. None before the first entry."""
        self.entry_count = 0
        self.batch_bytes = 0
        """The size of all batches in the log."""
        self.new_changes: dict[int, Change] = {}
        """By id, the last change after the checkpoint."""
        self.new_counters: Batch | None = None
        """The counters of the last batch after the checkpoint, as a batch without changes. None if there is no such
        batch."""
        self._previous_counters: Batch | None = None
        """The counters of the previous batch, before or after the checkpoint. None before the first batch."""
        self.bases: dict[int, Position] = {}
        """By epoch, the last position before the epoch, or (0, 0) if the epoch began with a restored snapshot."""
        self.leader: bytes | None = None
        """The encoded leader of the last takeover in the log. None if the log has no takeover."""
        self.last_epoch = 0
        """The epoch of the last takeover."""
        self.has_resigned = False
        """True if the last entry is a resignation."""

    def continues(self, position: Position, values: dict[bytes, bytes]) -> bool:
        """Return whether no entry is missing before the entry at `position`, which has the fields `values`.

        The first entry may be earlier than the checkpoint, at it, or directly after it.
        """
        checkpoint = self.meta.checkpoint.position
        if self._previous is None and position <= checkpoint:
            return True
        previous = checkpoint if self._previous is None else self._previous
        previous_epoch, previous_index = previous
        if b"base" not in values:  # a batch
            return position == (previous_epoch, previous_index + 1)
        try:
            base = decode_position(values[b"base"])  # the last position before a takeover
        except ValueError:
            return False
        _epoch, index = position
        return index == 0 and base == previous

    def add(self, position: Position, values: dict[bytes, bytes], decoder: RecordDecoder) -> None:
        """Check the next entry, and collect what it contains."""
        id_ = encode_position(position)
        self.entry_count += 1
        if not self.continues(position, values):
            if self._previous is None:
                checkpoint = encode_position(self.meta.checkpoint.position)
                self._add_finding(
                    "checkpoint", f"the log begins with {id_}, and does not reach back to the checkpoint {checkpoint}"
                )
            else:
                self._add_finding("log", f"{id_} does not continue {encode_position(self._previous)}")
        self._previous, self.has_resigned = position, b"resigned" in values
        try:
            if b"base" in values:
                self.bases[position[0]] = decode_position(values[b"base"])
                self.last_epoch, self.leader = position[0], values[b"node"]
                decode_node(self.leader)  # fails if it is invalid
            elif b"batch" in values:
                self._add_batch(position, values[b"batch"], decoder)
            else:
                self._add_finding("log", f"{id_} is neither a takeover nor a batch")
        except (UnknownFormat, DecodeError, ValueError, KeyError) as error:
            self._add_finding("log", f"{id_} cannot be decoded: {error}")

    def _add_batch(self, position: Position, encoded: bytes, decoder: RecordDecoder) -> None:
        """Check a batch, and collect its changes if it is later than the checkpoint."""
        self.batch_bytes += len(encoded)
        header, records = split_batch(encoded)
        counters, previous = decode_counters(header), self._previous_counters
        if previous is not None and (
            counters.next_id < previous.next_id
            or counters.next_fence < previous.next_fence
            or counters.clock_ms < previous.clock_ms
        ):
            self._add_finding("log", f"the clock or a counter of {encode_position(position)} is lower than before")
        self._previous_counters = counters
        is_later = position > self.meta.checkpoint.position
        if is_later:
            self.new_counters = counters
        for id_, record in records.items():
            change = decoder.decode(int(id_), record) if record else None
            if is_later:
                self.new_changes[int(id_)] = change
