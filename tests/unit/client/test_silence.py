"""A server that says nothing: when it is asked whether it is there, and when it is taken for gone."""

from __future__ import annotations

import math

import pytest

from genie.client.commands import Extend, Inspect, Ping, Release
from genie.client.pending import QUIET_S, STEP_S, STEPS
from genie.client.session import Core
from talk import SECRET, InOrder, ask, cut, error, greet, held, locked, queued, released, say, waiting
from talk import connected as connected_core

PING = say("ping")
PONG = say("pong")
GONE_S = QUIET_S + STEPS * STEP_S


def connected(*, watching: bool) -> Core:
    return connected_core(InOrder, watching=watching)


def run(core: Core, until: float) -> list[tuple[float, bytes]]:
    """Let time pass as a shell does, and nothing else; what was sent, and when."""
    sent = []
    while core.wake <= until:
        now = core.wake
        core.tick(now)
        data = core.outgoing()
        if data:
            sent.append((now, data))
        if core.broken:
            break
    return sent


def asked(core: Core) -> None:
    ask(core)


def releasing(core: Core) -> None:
    core.leave(held(core), 0.0)


def lock_held(core: Core) -> None:
    held(core, transaction_timeout=1000)


def abandoned(core: Core) -> None:
    core.abandon(ask(core), 0.0)


def extending(core: Core) -> None:
    lock = held(core)
    core.send(Extend(lock.id, 1000, lock), 0.0)


@pytest.mark.parametrize("stake", [asked, waiting, lock_held, releasing, abandoned, extending])
def test_one_that_stops_is_asked_once_and_then_left(stake):
    core = connected(watching=True)
    stake(core)
    core.outgoing()
    assert run(core, GONE_S - 0.001) == [(QUIET_S, PING)]
    assert not core.broken
    assert run(core, GONE_S) == []
    assert core.broken == "the server does not answer"


@pytest.mark.parametrize("call", [Ping(), Inspect(), Release(7)])
def test_one_that_does_not_answer_a_call_is_left(call):
    core = connected(watching=True)
    core.send(call, 0.0)
    core.outgoing()
    assert run(core, GONE_S) == [(QUIET_S, PING)]
    assert core.broken


def test_one_of_whom_nothing_is_wanted_is_left_alone():
    core = connected(watching=True)
    assert run(core, 100.0) == []
    assert core.wake == math.inf
    lock = held(core, now=100.0, transaction_timeout=1000)
    assert core.wake == 100.0 + QUIET_S
    core.leave(lock, 101.0)
    core.receive(released(101, "success", "2"), 101.0)
    core.outgoing()
    assert run(core, 300.0) == []
    assert core.wake == math.inf


def test_one_that_answers_is_asked_again_after_the_next_silence():
    core = connected(watching=True)
    held(core, transaction_timeout=1000)
    assert run(core, QUIET_S) == [(QUIET_S, PING)]
    late = GONE_S - 0.5
    assert run(core, late) == []
    assert core.receive(PONG, late)[0][1:] == (None, None)
    assert run(core, late + QUIET_S) == [(late + QUIET_S, PING)]
    assert run(core, late + GONE_S) == []
    assert core.broken


@pytest.mark.parametrize("word", [PONG[:5], queued(101, "1")])
def test_any_word_will_do_be_it_half_a_line(word):
    core = connected(watching=True)
    ask(core)
    core.outgoing()
    core.receive(word, QUIET_S - 0.5)
    assert run(core, GONE_S + QUIET_S - 0.501) == [(2 * QUIET_S - 0.5, PING)]
    assert not core.broken


def test_its_answer_belongs_to_nobody_elses_ping():
    core = connected(watching=True)
    waiting(core)
    run(core, QUIET_S)
    mine = Ping()
    core.send(mine, QUIET_S)
    assert core.receive(PONG, QUIET_S)[0][0] is not mine
    assert core.receive(PONG, QUIET_S) == [(mine, None, None)]
    assert not core.broken


def test_one_whose_store_is_away_is_left_as_it_says_so():
    core = connected(watching=True)
    waiting(core)
    run(core, QUIET_S)
    core.receive(error("unavailable", "no store"), QUIET_S + 2)
    assert "no store" in core.broken


def test_a_client_that_was_stopped_itself_reads_before_it_judges():
    core = connected(watching=True)
    waiting(core, queue_timeout=1000)
    run(core, QUIET_S)
    core.tick(QUIET_S + 100.0)
    assert not core.broken
    core.receive(PONG, QUIET_S + 100.0)
    assert run(core, QUIET_S + 100.0 + GONE_S - 0.001) == [(2 * QUIET_S + 100.0, PING)]
    assert not core.broken


def test_the_next_connection_is_watched_anew():
    core = connected(watching=True)
    request = waiting(core, queue_timeout=1000)
    run(core, GONE_S)
    assert core.broken
    core.disconnected("gone", 0.0)
    core.tick(50.0)
    core.connected()
    core.tick(51.0)
    assert not core.broken
    core.disconnected("gone again", 0.0)
    greet(core, now=60.0)
    assert core.outgoing() == request.line
    assert run(core, 60.0 + GONE_S - 0.001) == [(60.0 + QUIET_S, PING)]
    assert core.receive(locked(101, "1"), 60.0 + GONE_S - 0.001) == [(request, None, None)]


def test_a_lock_that_is_only_held_is_watched_on_the_next_connection_too():
    core = connected(watching=True)
    held(core, transaction_timeout=1000)
    cut(core, locked(101, "1", expiresIn=1_000_000), now=10.0)
    assert run(core, 10.0 + QUIET_S) == [(10.0 + QUIET_S, PING)]


def test_who_has_no_patience_for_a_connection_has_none_for_a_silent_one():
    core = InOrder(SECRET, patience=1.0)
    greet(core, resumed=False)
    ask(core)
    core.outgoing()
    assert run(core, 1.25) == [(0.5, PING)]
    assert core.broken
