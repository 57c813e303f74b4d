from __future__ import annotations

from itertools import islice

import pytest

from genie.client.reach import addresses, delays, spell
from genie.client.servers import Servers


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("GENIE_HOST", raising=False)
    monkeypatch.delenv("GENIE_PORT", raising=False)


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        (None, None, [("127.0.0.1", 7077)]),
        ("h", None, [("h", 7077)]),
        ("h", 80, [("h", 80)]),
        ("h:81", 80, [("h", 81)]),
        ("h1:1, h2,", 80, [("h1", 1), ("h2", 80)]),
        (["h1:1", "h2:2"], None, [("h1", 1), ("h2", 2)]),
        ("[::1]:5", None, [("::1", 5)]),
        ("[::1]", 6, [("::1", 6)]),
        ("::1", 6, [("::1", 6)]),
        (":9", None, [("127.0.0.1", 9)]),
    ],
)
def test_addresses(host, port, expected):
    assert addresses(host, port) == expected


def test_what_is_left_out_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("GENIE_HOST", "h1,h2:2")
    monkeypatch.setenv("GENIE_PORT", "99")
    assert addresses() == [("h1", 99), ("h2", 2)]
    assert addresses("h3") == [("h3", 99)]
    assert addresses(None, 5) == [("h1", 5), ("h2", 2)]


@pytest.mark.parametrize(("host", "port"), [("h:x", None), ("h:0", None), ("h", 65536), ("", None), ([], None)])
def test_what_is_no_address(host, port):
    with pytest.raises(ValueError, match=r"port|address"):
        addresses(host, port)


def test_an_address_is_spelled_as_it_is_read():
    assert [spell(address) for address in addresses("[::1]:5,h:1")] == ["[::1]:5", "h:1"]


def test_delays_double_up_to_a_bound_with_jitter():
    for number, delay in enumerate(islice(delays(), 20)):
        whole = min(0.025 * 2**number, 2.0)
        assert whole / 2 <= delay <= whole
    assert len({next(delays()) for _ in range(20)}) > 1


def test_after_a_connection_that_worked_the_next_attempt_comes_at_once():
    servers = Servers([("a", 1)], 10)
    assert servers.delay == 0
    list(servers.round())
    assert 0.0125 <= servers.delay <= 0.025
    list(servers.round())
    assert 0.025 <= servers.delay <= 0.05
    servers.worked()
    assert servers.delay == 0
    list(servers.round())
    assert 0.0125 <= servers.delay <= 0.025


@pytest.mark.parametrize(("stood", "at_once"), [(0.1, False), (2.0, True)])
def test_a_connection_that_stood_for_long_worked_though_nothing_was_asked(stood, at_once):
    servers = Servers([("a", 1)], 10)
    list(servers.round())
    servers.lost(("a", 1), "cut", stood)
    assert (servers.delay == 0) == at_once


def test_the_server_that_was_lost_is_tried_last():
    servers = Servers([("a", 1), ("b", 2), ("c", 3)], 9)
    assert "a:1 was lost: cut" in servers.lost(("a", 1), "cut", 0.1)
    assert list(servers.round()) == [("b", 2), ("c", 3), ("a", 1)]
    assert str(servers.unavailable()) == "no server at b:2, c:3, a:1: cut"
    assert servers.attempt_timeout == 3


class TestLeaders:
    """`leaders` says whom each node names."""

    @pytest.mark.parametrize(
        ("leaders", "tried"),
        [
            ({}, "a b c"),
            ({"a": "c:1"}, "a c b"),
            ({"a": "x:1"}, "a x b c"),
            ({"a": "b:1", "b": "a:1"}, "a b c"),
            ({"a": "a:1"}, "a b c"),
            ({"a": "x:1", "x": "y:1", "y": "z:1", "z": "u:1"}, "a x y z b c"),
            ({"a": "no:port"}, "a b c"),
        ],
    )
    def test_are_tried_next(self, leaders, tried):
        servers = Servers([("a", 1), ("b", 1), ("c", 1)], 10)
        order = []
        for name, _ in servers.round():
            order.append(name)
            servers.elsewhere(leaders.get(name, ""))
        assert order == tried.split()
        assert servers.answered

    def test_that_a_node_named_as_it_stepped_down_are_tried_first(self):
        servers = Servers([("a", 1), ("b", 1), ("c", 1)], 10)
        servers.lost(("a", 1), "unavailable", 0.1)
        servers.elsewhere("c:1")
        assert list(servers.round()) == [("c", 1), ("b", 1), ("a", 1)]
        assert list(servers.round()) == [("b", 1), ("c", 1), ("a", 1)]


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_timeout_that_is_none(timeout):
    with pytest.raises(ValueError, match="connect_timeout"):
        Servers([("a", 1)], timeout)
