"""The stored format: whatever a later version of Genie has added is rejected, never dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import defstruct, json, structs

from genie.core import WAITING, Context, LockManager, Release, Request
from genie.core.deadlines import NEVER
from genie.core.model import details_of
from genie.storage.redis import records
from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.keyspace import Checkpoint, Keyspace
from genie.storage.redis.primary import Primary
from genie.storage.redis.records import (
    Record,
    RecordDecoder,
    decode_counters,
    decode_records,
    encode,
    encode_batch,
    encode_changes,
    split_batch,
)
from genie.storage.redis.url import RedisUrl
from genie.storage.store import Batch, RetainedReply, StoredOrigin, UnknownFormat


def held(**options: str) -> Request:
    request = Request(exclusive=("a",), **options)
    LockManager().step(request, 0)
    return request


def test_a_field_of_a_later_version_is_rejected() -> None:
    record = json.decode(encode(held()))
    decoder = RecordDecoder()
    decoder.decode(7, json.encode(record))
    with pytest.raises(UnknownFormat, match=r"record of 7 was written by another version of Genie.*`lease`"):
        decoder.decode(7, json.encode(record | {"lease": 5}))


@pytest.mark.parametrize(("exclusive", "units"), [(("a/**",), {}), ((), {"pool": (1, 2)})], ids=["a subtree", "units"])
def test_a_version_that_knows_only_plain_names_rejects_units_and_subtrees(
    monkeypatch: pytest.MonkeyPatch, exclusive: tuple[str, ...], units: dict[str, tuple[int, int]]
) -> None:
    """Otherwise such a version would take a subtree for a name, and ignore the units. Its followers refuse to lead."""
    known = [field for field in structs.fields(Record) if field.name != "details"]
    older = defstruct(
        "OlderRecord",
        [(field.name, field.type) if field.required else (field.name, field.type, field.default) for field in known],
        forbid_unknown_fields=True,
    )
    monkeypatch.setattr(records, "_decode", json.Decoder(older).decode)
    request = Request(exclusive=exclusive)
    request.details = details_of((), exclusive, units)
    LockManager().step(request, 0)
    with pytest.raises(UnknownFormat, match=r"record of 7 was written by another version of Genie.*`details`"):
        RecordDecoder().decode(7, encode(request))


@pytest.mark.parametrize(("field", "value"), [("fence", "12"), ("exclusive", "a"), ("deadline", None)])
def test_a_value_of_another_type_is_rejected(field: str, value: object) -> None:
    record = json.decode(encode(held()))
    with pytest.raises(UnknownFormat, match=field):
        RecordDecoder().decode(7, json.encode(record | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("since", 1e308),
        ("since_unix_ms", 10**30),
        ("deadline", 2**63),
        ("priority", -1e308),
        ("fence", 2**64),
        ("session_timeout_ms", 1e300),
        ("moved", {"a": [0, 10**300]}),
        ("details", {"units": {"b": [1, 10**300]}}),
    ],
)
def test_a_number_with_which_a_server_cannot_calculate_is_rejected(field: str, value: object) -> None:
    record = json.decode(encode(held()))
    encoded = b'%b,"%b":%b}' % (json.encode(record)[:-1], field.encode(), repr(value).replace("'", '"').encode())
    with pytest.raises(UnknownFormat, match=field):
        RecordDecoder().decode(7, encoded)


@pytest.mark.parametrize(
    "counters", [b"", b"1.5 10", b"nan 10 20", b"1.5 1e3 20", b"1.5 10 %d" % (records.MAX_NUMBER + 1)]
)
def test_counters_with_which_a_server_cannot_calculate_are_rejected(counters: bytes) -> None:
    with pytest.raises(UnknownFormat, match="counters"):
        decode_counters(counters)


@pytest.mark.parametrize("id_", [b"", b"x", b"-5", b"1_0", b"0", b"%d" % (records.MAX_NUMBER + 1), b"9" * 5_000])
def test_an_id_that_no_server_assigns_is_rejected(id_: bytes) -> None:
    with pytest.raises(UnknownFormat, match="is not the id of a record"):
        decode_records({id_: b""}, RecordDecoder())


@pytest.mark.parametrize(
    "record", [b"{", b'{"since":1,"since_unix_ms":0,"deadline":0,"state":"ended","session":"s","ref":"r","line":"x"}']
)
def test_a_malformed_record_is_rejected(record: bytes) -> None:
    with pytest.raises(UnknownFormat, match="record of 7 is malformed"):
        RecordDecoder().decode(7, record)


def test_a_request_that_waits_without_a_time_limit_is_decoded() -> None:
    request = held()
    request.state, request.deadline, request.fence = WAITING, NEVER, 0
    decoded = RecordDecoder().decode(7, encode(request))
    assert isinstance(decoded, Request)
    assert decoded.deadline == NEVER


def test_a_record_without_the_fields_of_every_version_is_rejected() -> None:
    for missing in ("since", "since_unix_ms", "deadline"):
        record = json.decode(encode(held()))
        del record[missing]
        with pytest.raises(UnknownFormat, match=missing):
            RecordDecoder().decode(7, json.encode(record))


def test_defaults_are_not_stored() -> None:
    """The defaults would be half of the record of a plain lock."""
    request = Request(exclusive=("a",), queue_timeout_ms=float("10000"), transaction_timeout_ms=10_000, priority=0.0)
    LockManager().step(request, 0)
    assert json.decode(encode(request)).keys() == {"since", "since_unix_ms", "deadline", "exclusive", "fence"}
    request.queue_timeout_ms = request.transaction_timeout_ms = 9_999.5
    assert (
        json.decode(encode(request), type=Record).queue_timeout_ms,
        json.decode(encode(request))["transaction_timeout_ms"],
    ) == (9_999.5, 9_999.5)


NOTES = st.none() | st.text(min_size=1)


@given(st.dictionaries(st.integers(1, 10**15), NOTES))
def test_a_batch_is_split_as_it_was_encoded(notes: dict[int, str | None]) -> None:
    """Whatever the texts of clients contain: JSON escapes line breaks."""
    changes = {id_: None if note is None else held(context=Context(note=note), ref=note) for id_, note in notes.items()}
    batch = Batch(dict(changes), 10, 20, 1.5)
    counters, records = split_batch(encode_batch(batch, encode_changes(batch.changes)))
    assert decode_counters(counters) == Batch({}, 10, 20, 1.5)
    decoded = decode_records(records, RecordDecoder())
    assert list(decoded) == list(notes)
    for id_, request in decoded.items():
        assert (
            request is None
            if notes[id_] is None
            else isinstance(request, Request) and request.context.note == notes[id_]
        )


def test_an_ended_request_is_deleted() -> None:
    manager, request = LockManager(), Request(exclusive=("a",))
    manager.step(request, 0)
    manager.step(Release(request.id), 0)
    assert split_batch(encode_batch(Batch({}, 10, 20, 1.5), encode_changes({request.id: request}))) == (
        b"1.500 10 20",
        {b"%d" % request.id: b""},
    )


def test_units_and_subtrees_are_stored() -> None:
    request = Request(("a",), ("b/**",), queue_timeout_ms=1)
    request.details = details_of(request.shared, request.exclusive, {"pool": (2, 10)})
    LockManager(7).step(request, 0)
    loaded = RecordDecoder().decode(request.id, encode(request))
    assert isinstance(loaded, Request)
    assert loaded.details is not None
    assert (loaded.shared, loaded.exclusive, loaded.units) == (("a",), ("b/**",), {"pool": (2, 10)})
    assert loaded.details.subtrees == ("b/**",)


def test_every_field_of_a_record_is_written() -> None:
    """A field that is added to `Record` must be encoded, too, by a request or by a retained reply."""
    origin = StoredOrigin("session", 5, "program 1@host")
    request = Request(
        ("s",),
        ("x",),
        1,
        transaction_timeout_ms=2,
        transaction="T",
        priority=3,
        ref="ref",
        release_on_disconnect=True,
        origin=origin,
        context=Context("p", "n", "00", "digest"),
    )
    request.id = request.fence = request.since = request.since_unix_ms = request.deadline = 7
    request.state = WAITING
    request.queue_entry = (-request.priority, request.id, request)
    request.move("x", (1, 2, request))
    request.details = details_of(request.shared, request.exclusive, {"pool": (2, 10)})
    reply = RetainedReply(8, "ref", origin, 1, b'{"payload":{"reason":"success"}}\n')
    written = json.decode(encode(request)).keys() | json.decode(encode(reply)).keys()
    assert written == set(Record.__struct_fields__)


# -- meta ---------------------------------------------------------------------------------------------

META = {
    "version": b"1",
    "epoch": b"7",
    "nonce": b"n",
    "node": b"",
    "history": b"0-0 6-3",
    "state": b"{n}:state:7-n",
    "checkpoint": b"6-2 1.500 10 20",
    "attempt": b"0",
}


def reply(last_id: bytes, **changed: bytes | None) -> tuple[list[bytes], bytes]:
    """Return the reply of `read.lua`, with other values of some fields of `meta`; None: without the field."""
    fields = [(name, changed.get(name, value)) for name, value in META.items()]
    return [part for name, value in fields if value is not None for part in (name.encode(), value)], last_id


def keyspace() -> Keyspace:
    return Keyspace(Primary(RedisUrl.parse("redis://"), "k"), "n")


@pytest.mark.parametrize("version", [b"0", b"2", b"", None])
def test_another_format_version_is_rejected(version: bytes | None) -> None:
    name = "none" if version is None else version.decode()
    with pytest.raises(
        UnknownFormat, match=rf"{{n}}:meta has the format version {name}, and this version of Genie knows 1"
    ):
        keyspace()._decode_meta(reply(b"7-3", version=version), asking=False)


def test_the_position_of_redis_is_that_of_the_last_entry() -> None:
    meta = keyspace()._decode_meta(reply(b"7-3"), asking=False)
    assert meta is not None
    assert meta.has_log
    assert meta.position == (7, 3)
    assert meta.history.ends == ((0, 0), (6, 3), (7, 3))
    assert meta.checkpoint == Checkpoint((6, 2), Batch({}, 10, 20, 1.5))


@pytest.mark.parametrize(
    ("checkpoint", "ends"),
    [(b"6-2", ((0, 0), (6, 2))), (b"7-5", ((0, 0), (6, 3), (7, 5))), (b"7-0", ((0, 0), (6, 3), (7, 0)))],
)
def test_without_its_log_redis_is_at_the_checkpoint(checkpoint: bytes, ends: tuple[tuple[int, int], ...]) -> None:
    meta = keyspace()._decode_meta(reply(b"", checkpoint=checkpoint + b" 1.500 10 20"), asking=False)
    assert meta is not None
    assert not meta.has_log
    assert meta.history.ends == ends


def test_an_importing_node_without_the_key_does_not_have_an_empty_namespace() -> None:
    assert keyspace()._decode_meta(([], b""), asking=False) is None
    with pytest.raises(RedisFailure, match="the key has not arrived yet"):
        keyspace()._decode_meta(([], b""), asking=True)
