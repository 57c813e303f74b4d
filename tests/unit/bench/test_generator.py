"""One connection's part of the load, spoken to in the server's words."""

from __future__ import annotations

import re

import orjson
import pytest

from genie.bench.generator import NO_MESSAGE, RELEASED_BY_OTHER, WORKLOADS, LoadConnection, Shape, Tally
from genie.protocol.messages import command

ASK = command("request", resources=["exclusive:a"])
OTHER = command("request", resources=["exclusive:b"])


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


def one(tally: Tally) -> LoadConnection:
    """A connection with one slot, which has asked at 1,000 ns."""
    cycles = LoadConnection([(ASK,)], tally)
    assert cycles.tick(1_000) == ASK
    return cycles


def test_a_cycle_follows_the_other(tally: Tally) -> None:
    cycles = one(tally)
    assert cycles.tick(1_010) == b""
    assert cycles.receive(queued(1), 1_020) == b""
    assert cycles.receive(locked(1), 1_100) == release(1)
    assert cycles.receive(released(1), 1_250) == ASK
    assert cycles.receive(queued(2) + locked(2), 1_300) == release(2)
    assert (tally.to_locked.count, tally.to_locked.max_ns) == (1, 100)
    assert (tally.to_released.count, tally.to_released.max_ns) == (1, 250)
    assert cycles.receive(released(2), 1_450) == ASK
    assert (tally.to_locked.count, tally.to_locked.quantile_ns(1), tally.to_released.quantile_ns(1)) == (2, 50, 200)
    assert not tally.errors


def test_messages_come_in_pieces(tally: Tally) -> None:
    cycles = one(tally)
    data = queued(1) + locked(1) + released(1)
    assert b"".join(cycles.receive(data[at : at + 1], 2_000) for at in range(len(data))) == release(1) + ASK
    assert tally.to_released.count == 1


def test_slots_are_told_apart_by_the_order_of_their_requests(tally: Tally) -> None:
    cycles = LoadConnection([(ASK,), (OTHER,)], tally)
    assert cycles.tick(0) == ASK + OTHER
    assert cycles.receive(queued(1) + queued(2) + locked(2), 10) == release(2)
    assert cycles.receive(released(2), 20) == OTHER
    assert cycles.receive(locked(1) + released(1), 30) == release(1) + ASK
    assert cycles.owed == 2


def test_a_slot_asks_with_one_of_its_lines_at_random(tally: Tally) -> None:
    cycles = LoadConnection([(ASK, OTHER)] * 200, tally)
    assert set(cycles.tick(0).splitlines(keepends=True)) == {ASK, OTHER}


def test_nothing_is_counted_while_it_warms_up(tally: Tally) -> None:
    tally.measuring = False
    cycles = one(tally)
    cycles.receive(queued(1) + locked(1) + released(1), 2_000)
    assert (tally.to_locked.count, tally.to_released.count) == (0, 0)
    cycles.receive(error("unavailable"), 2_000)
    assert tally.errors == {"unavailable": 1}, "but errors are"


def test_a_refused_request_is_counted_and_asked_again_at_the_next_tick(tally: Tally) -> None:
    cycles = one(tally)
    assert cycles.receive(error("unavailable"), 2_000) == b""
    assert (tally.errors, cycles.owed) == ({"unavailable": 1}, 0)
    assert cycles.tick(3_000) == ASK
    assert cycles.tick(3_000) == b""


def test_the_oldest_request_is_the_one_that_was_refused(tally: Tally) -> None:
    cycles = LoadConnection([(ASK,), (OTHER,)], tally)
    cycles.tick(0)
    assert cycles.receive(error("too-many") + queued(1) + locked(1) + released(1), 10) == release(1) + OTHER
    assert cycles.tick(20) == ASK


def test_a_refused_release_is_repeated(tally: Tally) -> None:
    cycles = one(tally)
    cycles.receive(queued(1) + locked(1), 2_000)
    assert cycles.receive(error("unavailable", 1), 2_000) == b""
    assert cycles.tick(3_000) == release(1)
    assert cycles.tick(3_000) == b""
    assert cycles.receive(released(1), 4_000) == ASK
    assert (tally.errors, tally.to_released.count) == ({"unavailable": 1}, 1)


def test_a_lock_that_the_server_has_forgotten(tally: Tally) -> None:
    cycles = one(tally)
    cycles.receive(queued(1) + locked(1), 2_000)
    assert cycles.receive(error("unknown-id", 1), 2_000) == b""
    assert cycles.tick(3_000) == ASK
    assert (tally.errors, tally.to_released.count, cycles.owed) == ({"unknown-id": 1}, 0, 1)


@pytest.mark.parametrize("reason", ["queue-timeout", "deadlock", "of the future"])
def test_a_request_that_is_not_granted_is_counted_by_its_reason(tally: Tally, reason: str) -> None:
    cycles = one(tally)
    assert cycles.receive(queued(1) + released(1, reason), 2_000) == b""
    assert (tally.errors, tally.to_released.count, cycles.owed) == ({reason: 1}, 0, 0)
    assert cycles.tick(3_000) == ASK


def test_a_lock_that_times_out_while_its_release_is_under_way(tally: Tally) -> None:
    cycles = one(tally)
    cycles.receive(queued(1) + locked(1), 2_000)
    assert cycles.receive(released(1, "transaction-timeout"), 2_000) == b""
    assert cycles.tick(3_000) == ASK
    assert cycles.receive(released(1, "transaction-timeout"), 3_000) == b"", "the answer to the release"
    assert (tally.errors, tally.to_released.count, cycles.owed) == ({"transaction-timeout": 1}, 0, 1)


def test_somebody_else_released_it(tally: Tally) -> None:
    cycles = one(tally)
    cycles.receive(queued(1) + released(1), 2_000)
    assert (tally.errors, tally.to_released.count) == ({RELEASED_BY_OTHER: 1}, 0)


def test_stopping_cancels_what_waits_and_begins_nothing(tally: Tally) -> None:
    cycles = LoadConnection([(ASK,)] * 4, tally)
    cycles.tick(0)
    cycles.receive(queued(1) + queued(2) + queued(3) + locked(1), 10)
    assert cycles.stop() == release(2) + release(3), "1 is being released already"
    assert cycles.receive(queued(4), 20) == release(4)
    assert cycles.receive(locked(2), 20) == b""
    assert cycles.owed == 4
    assert cycles.receive(b"".join(map(released, (1, 2, 3, 4))), 30) == b""
    assert cycles.owed == 0
    assert cycles.tick(40) == b""
    assert (tally.to_released.count, tally.errors) == (1, {}), "what was cancelled is no cycle"


def test_a_release_that_is_refused_while_stopping_is_repeated(tally: Tally) -> None:
    cycles = one(tally)
    cycles.receive(queued(1), 10)
    cycles.stop()
    cycles.receive(error("unavailable", 1), 20)
    assert (cycles.owed, cycles.tick(30)) == (1, release(1))


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n", b"\xff\n", b'{"command":"queued"}\n', b"x" * (2 << 20), queued(1) * 2]
)
def test_what_is_no_answer_breaks_the_connection(tally: Tally, data: bytes) -> None:
    cycles = one(tally)
    cycles.receive(data, 10)
    assert "no message of a Genie server" in cycles.broken
    assert tally.errors == {NO_MESSAGE: 1}


def test_messages_of_a_newer_server_are_skipped(tally: Tally) -> None:
    cycles = one(tally)
    cycles.receive(command("news", what="?") + queued(1), 10)
    assert (cycles.broken, cycles.owed) == ("", 1)


def test_a_connection_that_was_refused_is_told_from_one_that_went_on(tally: Tally) -> None:
    cycles = one(tally)
    cycles.receive(command("error", code="too-many", message="no more fit"), 10)
    assert cycles.refused == "too-many: no more fit"
    cycles.tick(20)
    cycles.receive(queued(1), 30)
    assert cycles.refused == ""
    cycles.receive(error("unavailable", 1), 40)
    assert cycles.refused == "", "it has taken a request"


# -- what is asked for ----------------------------------------------------------------------------------------


def asked(workload: str, shape: Shape, count: int) -> list[list[list[str]]]:
    """For each slot the resources of each of its lines, without the prefix."""
    slots = []
    for lines in WORKLOADS[workload].slots("prefix/", shape, count):
        payloads = [orjson.loads(line)["payload"] for line in lines]
        assert all(payload["onDisconnect"] == "release" for payload in payloads)
        assert all(re.match(r"(shared|exclusive):prefix/.", name) for one in payloads for name in one["resources"])
        slots.append([[name.replace("prefix/", "") for name in payload["resources"]] for payload in payloads])
    return slots


def test_own_keys() -> None:
    assert asked("own", Shape(), 3) == [[["exclusive:0"]], [["exclusive:1"]], [["exclusive:2"]]]


def test_a_hot_key() -> None:
    assert asked("hot", Shape(), 2) == [[["exclusive:hot"]]] * 2


@pytest.mark.parametrize("percent", [0, 1, 80, 100])
def test_a_mix_has_the_share_that_was_asked_for_on_every_key(percent: int) -> None:
    first, second = asked("mixed", Shape(keys=3, shared_percent=percent), 2)
    assert first == second
    for key in range(3):
        modes = [name for (name,) in first if name.endswith(f":{key}")]
        assert (len(modes), modes.count(f"shared:{key}")) == (100, percent)


def test_several_keys_in_a_request() -> None:
    assert asked("several", Shape(resources=2), 2) == [
        [["exclusive:0/0", "exclusive:0/1"]],
        [["exclusive:1/0", "exclusive:1/1"]],
    ]
