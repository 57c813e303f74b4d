"""The protocol state of one connection of the load, and the workloads."""

from __future__ import annotations

import re

import orjson
import pytest

from genie.bench.generator import (
    PROTOCOL_ERROR,
    RELEASED_BY_OTHER,
    WORKLOADS,
    LoadConnection,
    Tally,
    WorkloadParameters,
)
from genie.protocol.messages import command

REQUEST = command("request", resources=["exclusive:a"])
OTHER_REQUEST = command("request", resources=["exclusive:b"])


def queued(id_: int) -> bytes:
    return command("queued", id=id_)


def locked(id_: int) -> bytes:
    return command("locked", id=id_, fence=id_)


def released(id_: int, reason: str = "success") -> bytes:
    return command("released", id=id_, reason=reason)


def release(id_: int) -> bytes:
    return command("release", id=id_)


def error(code: str, id_: int | None = None) -> bytes:
    return command("error", code=code, message="", id=id_)


@pytest.fixture
def tally() -> Tally:
    tally = Tally()
    tally.measuring = True
    return tally


def one_slot(tally: Tally) -> LoadConnection:
    """A connection with one slot, whose request was sent at 1,000 ns."""
    connection = LoadConnection([(REQUEST,)], tally)
    assert connection.tick(1_000) == REQUEST
    return connection


def test_a_completed_cycle_starts_the_next(tally: Tally) -> None:
    connection = one_slot(tally)
    assert connection.tick(1_010) == b""
    assert connection.receive(queued(1), 1_020) == b""
    assert connection.receive(locked(1), 1_100) == release(1)
    assert connection.receive(released(1), 1_250) == REQUEST
    assert connection.receive(queued(2) + locked(2), 1_300) == release(2)
    assert (tally.to_locked.count, tally.to_locked.max_ns) == (1, 100)
    assert (tally.to_released.count, tally.to_released.max_ns) == (1, 250)
    assert connection.receive(released(2), 1_450) == REQUEST
    assert (tally.to_locked.count, tally.to_locked.quantile_ns(1), tally.to_released.quantile_ns(1)) == (2, 50, 200)
    assert not tally.errors


def test_messages_may_arrive_in_pieces(tally: Tally) -> None:
    connection = one_slot(tally)
    data = queued(1) + locked(1) + released(1)
    assert b"".join(connection.receive(data[at : at + 1], 2_000) for at in range(len(data))) == release(1) + REQUEST
    assert tally.to_released.count == 1


def test_ids_are_assigned_to_slots_in_the_order_of_their_requests(tally: Tally) -> None:
    connection = LoadConnection([(REQUEST,), (OTHER_REQUEST,)], tally)
    assert connection.tick(0) == REQUEST + OTHER_REQUEST
    assert connection.receive(queued(1) + queued(2) + locked(2), 10) == release(2)
    assert connection.receive(released(2), 20) == OTHER_REQUEST
    assert connection.receive(locked(1) + released(1), 30) == release(1) + REQUEST
    assert connection.unfinished_count == 2


def test_a_slot_sends_one_of_its_lines_at_random(tally: Tally) -> None:
    connection = LoadConnection([(REQUEST, OTHER_REQUEST)] * 200, tally)
    assert set(connection.tick(0).splitlines(keepends=True)) == {REQUEST, OTHER_REQUEST}


def test_the_warm_up_counts_errors_but_no_durations(tally: Tally) -> None:
    tally.measuring = False
    connection = one_slot(tally)
    connection.receive(queued(1) + locked(1) + released(1), 2_000)
    assert (tally.to_locked.count, tally.to_released.count) == (0, 0)
    connection.receive(error("unavailable"), 2_000)
    assert tally.errors == {"unavailable": 1}


def test_a_rejected_request_is_counted_and_sent_again_at_the_next_tick(tally: Tally) -> None:
    connection = one_slot(tally)
    assert connection.receive(error("unavailable"), 2_000) == b""
    assert (tally.errors, connection.unfinished_count) == ({"unavailable": 1}, 0)
    assert connection.tick(3_000) == REQUEST
    assert connection.tick(3_000) == b""


def test_an_error_without_id_rejects_the_oldest_request(tally: Tally) -> None:
    connection = LoadConnection([(REQUEST,), (OTHER_REQUEST,)], tally)
    connection.tick(0)
    assert connection.receive(error("too-many") + queued(1) + locked(1) + released(1), 10) == release(1) + OTHER_REQUEST
    assert connection.tick(20) == REQUEST


def test_a_rejected_release_is_sent_again_at_the_next_tick(tally: Tally) -> None:
    connection = one_slot(tally)
    connection.receive(queued(1) + locked(1), 2_000)
    assert connection.receive(error("unavailable", 1), 2_000) == b""
    assert connection.tick(3_000) == release(1)
    assert connection.tick(3_000) == b""
    assert connection.receive(released(1), 4_000) == REQUEST
    assert (tally.errors, tally.to_released.count) == ({"unavailable": 1}, 1)


def test_an_unknown_id_frees_the_slot(tally: Tally) -> None:
    connection = one_slot(tally)
    connection.receive(queued(1) + locked(1), 2_000)
    assert connection.receive(error("unknown-id", 1), 2_000) == b""
    assert connection.tick(3_000) == REQUEST
    assert (tally.errors, tally.to_released.count, connection.unfinished_count) == ({"unknown-id": 1}, 0, 1)


@pytest.mark.parametrize("reason", ["queue-timeout", "deadlock", "of the future"])
def test_a_request_that_is_not_granted_is_counted_by_its_reason(tally: Tally, reason: str) -> None:
    connection = one_slot(tally)
    assert connection.receive(queued(1) + released(1, reason), 2_000) == b""
    assert (tally.errors, tally.to_released.count, connection.unfinished_count) == ({reason: 1}, 0, 0)
    assert connection.tick(3_000) == REQUEST


def test_a_lock_that_times_out_before_its_release_arrives(tally: Tally) -> None:
    connection = one_slot(tally)
    connection.receive(queued(1) + locked(1), 2_000)
    assert connection.receive(released(1, "transaction-timeout"), 2_000) == b""
    assert connection.tick(3_000) == REQUEST
    assert connection.receive(released(1, "transaction-timeout"), 3_000) == b"", "the answer to the release"
    assert (tally.errors, tally.to_released.count, connection.unfinished_count) == ({"transaction-timeout": 1}, 0, 1)


def test_a_release_by_another_client_is_an_error(tally: Tally) -> None:
    connection = one_slot(tally)
    connection.receive(queued(1) + released(1), 2_000)
    assert (tally.errors, tally.to_released.count) == ({RELEASED_BY_OTHER: 1}, 0)


def test_stopping_cancels_waiting_requests_and_starts_no_cycle(tally: Tally) -> None:
    connection = LoadConnection([(REQUEST,)] * 4, tally)
    connection.tick(0)
    connection.receive(queued(1) + queued(2) + queued(3) + locked(1), 10)
    assert connection.stop() == release(2) + release(3), "1 is being released already"
    assert connection.receive(queued(4), 20) == release(4)
    assert connection.receive(locked(2), 20) == b""
    assert connection.unfinished_count == 4
    assert connection.receive(b"".join(map(released, (1, 2, 3, 4))), 30) == b""
    assert connection.unfinished_count == 0
    assert connection.tick(40) == b""
    assert (tally.to_released.count, tally.errors) == (1, {}), "a cancelled request is no cycle"


def test_a_release_that_is_rejected_while_stopping_is_sent_again(tally: Tally) -> None:
    connection = one_slot(tally)
    connection.receive(queued(1), 10)
    connection.stop()
    connection.receive(error("unavailable", 1), 20)
    assert (connection.unfinished_count, connection.tick(30)) == (1, release(1))


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n", b"\xff\n", b'{"command":"queued"}\n', b"x" * (2 << 20), queued(1) * 2]
)
def test_invalid_input_is_a_protocol_error(tally: Tally, data: bytes) -> None:
    connection = one_slot(tally)
    connection.receive(data, 10)
    assert "invalid message" in connection.protocol_error
    assert tally.errors == {PROTOCOL_ERROR: 1}


def test_messages_of_a_newer_server_are_skipped(tally: Tally) -> None:
    connection = one_slot(tally)
    connection.receive(command("news", what="?") + queued(1), 10)
    assert (connection.protocol_error, connection.unfinished_count) == ("", 1)


def test_the_rejection_of_a_connection_ends_with_its_first_accepted_request(tally: Tally) -> None:
    connection = one_slot(tally)
    connection.receive(command("error", code="too-many", message="too many connections"), 10)
    assert connection.rejection == "too-many: too many connections"
    connection.tick(20)
    connection.receive(queued(1), 30)
    assert connection.rejection == ""
    connection.receive(error("unavailable", 1), 40)
    assert connection.rejection == "", "the server has accepted a request before"


# -- workloads ----------------------------------------------------------------------------------------


def resources_of_slots(workload: str, parameters: WorkloadParameters, count: int) -> list[list[list[str]]]:
    """Return the resources of each line of each slot, without the prefix."""
    slots = []
    for lines in WORKLOADS[workload].encode_slots("prefix/", parameters, count):
        payloads = [orjson.loads(line)["payload"] for line in lines]
        assert all(payload["onDisconnect"] == "release" for payload in payloads)
        assert all(re.match(r"(shared|exclusive):prefix/.", name) for one in payloads for name in one["resources"])
        slots.append([[name.replace("prefix/", "") for name in payload["resources"]] for payload in payloads])
    return slots


def test_own_uses_one_key_for_each_slot() -> None:
    assert resources_of_slots("own", WorkloadParameters(), 3) == [
        [["exclusive:0"]],
        [["exclusive:1"]],
        [["exclusive:2"]],
    ]


def test_hot_uses_one_key_for_all_slots() -> None:
    assert resources_of_slots("hot", WorkloadParameters(), 2) == [[["exclusive:hot"]]] * 2


@pytest.mark.parametrize("percent", [0, 1, 80, 100])
def test_mixed_has_the_configured_percentage_of_shared_requests_on_every_key(percent: int) -> None:
    first, second = resources_of_slots("mixed", WorkloadParameters(keys=3, shared_percent=percent), 2)
    assert first == second
    for key in range(3):
        modes = [name for (name,) in first if name.endswith(f":{key}")]
        assert (len(modes), modes.count(f"shared:{key}")) == (100, percent)


def test_several_uses_a_group_of_keys_for_each_slot() -> None:
    assert resources_of_slots("several", WorkloadParameters(resources=2), 2) == [
        [["exclusive:0/0", "exclusive:0/1"]],
        [["exclusive:1/0", "exclusive:1/1"]],
    ]
