from __future__ import annotations

import ssl
from itertools import islice

import pytest

from genie.backoff import Backoff
from genie.client import config
from genie.client.config import Address, format_address, parse_addresses
from genie.client.errors import from_error_reply
from genie.client.failover import ServerList
from genie.protocol.messages import Error

CONTEXT = ssl.create_default_context()


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
    assert [address[:2] for address in parse_addresses(host, port)] == expected
    assert all(address.tls is None for address in parse_addresses(host, port))


@pytest.mark.parametrize(
    ("host", "ssl", "secure"),
    [
        ("genies://h", None, [True]),
        ("genies://h:1/", None, [True]),
        ("genie://h:1", None, [False]),
        ("genie://h:1", False, [False]),
        ("h", True, [True]),
        ("h", CONTEXT, [True]),
        ("genies://a:1,b:2,genie://c:3", None, [True, True, False]),
        (["genies://[::1]:1", "[::1]"], True, [True, True]),
    ],
)
def test_the_prefix_selects_tls(host, ssl, secure):
    found = parse_addresses(host, ssl=ssl)
    assert [address.tls is not None for address in found] == secure
    assert len({address.tls for address in found} - {None}) <= 1
    assert not any("/" in address.host for address in found)
    if ssl is CONTEXT:
        assert found[0].tls is CONTEXT


@pytest.mark.parametrize(
    ("host", "ssl"), [("genie://h", True), ("genies://h", False), ("http://h", None), ("genies://h/path", None)]
)
def test_a_prefix_that_contradicts_ssl(host, ssl):
    with pytest.raises(ValueError, match="genie"):
        parse_addresses(host, ssl=ssl)


def test_the_error_names_the_variable_of_a_wrong_file(monkeypatch, tmp_path):
    monkeypatch.setenv("GENIE_TLS_CERT", str(tmp_path / "none.pem"))
    assert parse_addresses("h")
    with pytest.raises(ValueError, match=r"GENIE_TLS_CERT: .*none\.pem can't be read"):
        parse_addresses("genies://h")


@pytest.mark.parametrize("ssl", ["ca.pem", "", 1, ("cert", "key")])
def test_ssl_of_a_wrong_type(ssl):
    with pytest.raises(TypeError, match=r"ssl must be True, False, None or an ssl\.SSLContext"):
        parse_addresses("h", ssl=ssl)


def test_a_key_without_a_certificate(monkeypatch):
    monkeypatch.delenv("GENIE_TLS_CERT", raising=False)
    monkeypatch.setenv("GENIE_TLS_KEY", "key.pem")
    assert parse_addresses("h")
    with pytest.raises(ValueError, match="GENIE_TLS_KEY is set without GENIE_TLS_CERT"):
        parse_addresses("genies://h")


def test_defaults_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("GENIE_HOST", "h1,h2:2")
    monkeypatch.setenv("GENIE_PORT", "99")
    assert parse_addresses() == [Address("h1", 99), Address("h2", 2)]
    assert parse_addresses("h3") == [Address("h3", 99)]
    assert parse_addresses(None, 5) == [Address("h1", 5), Address("h2", 2)]


def test_a_service_link_of_kubernetes_is_ignored_with_one_warning(monkeypatch, caplog):
    config._warn_port_ignored.cache_clear()
    monkeypatch.setenv("GENIE_PORT", "tcp://10.96.3.4:7077")
    assert parse_addresses("h:1") == [Address("h", 1)]
    assert not caplog.records, "the port is not needed"
    assert parse_addresses("h") == [Address("h", 7077)]
    assert parse_addresses("h") == [Address("h", 7077)]
    assert [record.message for record in caplog.records] == [
        "GENIE_PORT=tcp://10.96.3.4:7077 ignored, using port 7077: it is a Kubernetes service link (enableServiceLinks)"
    ]


def test_a_default_port_that_is_not_needed_is_not_checked(monkeypatch):
    monkeypatch.setenv("GENIE_PORT", "x")
    assert parse_addresses("h:1") == [Address("h", 1)]
    with pytest.raises(ValueError, match="GENIE_PORT: a port is a number"):
        parse_addresses("h:1,i")


@pytest.mark.parametrize(("host", "port"), [("h:x", None), ("h:0", None), ("h", 65536), ("", None), ([], None)])
def test_invalid_addresses(host, port):
    with pytest.raises(ValueError, match=r"port|address"):
        parse_addresses(host, port)


def test_a_formatted_address_can_be_parsed():
    assert [format_address(address) for address in parse_addresses("[::1]:5,h:1")] == ["[::1]:5", "h:1"]
    assert [format_address(address) for address in parse_addresses("[::1]:5", ssl=CONTEXT)] == ["genies://[::1]:5"]


def test_delays_double_up_to_the_maximum_with_jitter():
    for number, delay in enumerate(islice(iter(Backoff().next_delay, None), 20)):
        whole = min(0.025 * 2**number, 2.0)
        assert whole / 2 <= delay <= whole
    assert len({Backoff().next_delay() for _ in range(20)}) > 1


def test_after_a_successful_connection_the_next_attempt_has_no_delay():
    servers = ServerList([Address("a", 1)], 10)
    assert servers.next_round_delay_s == 0
    list(servers.next_round())
    assert 0.0125 <= servers.next_round_delay_s <= 0.025
    list(servers.next_round())
    assert 0.025 <= servers.next_round_delay_s <= 0.05
    servers.on_success()
    assert servers.next_round_delay_s == 0
    list(servers.next_round())
    assert 0.0125 <= servers.next_round_delay_s <= 0.025


@pytest.mark.parametrize(("stood", "at_once"), [(0.1, False), (2.0, True)])
def test_a_long_connection_counts_as_successful_without_a_reply(stood, at_once):
    servers = ServerList([Address("a", 1)], 10)
    list(servers.next_round())
    servers.on_disconnect(Address("a", 1), "cut", stood)
    assert (servers.next_round_delay_s == 0) == at_once


def test_the_lost_server_is_tried_last():
    servers = ServerList([Address("a", 1), Address("b", 2), Address("c", 3)], 9)
    assert "a:1 was lost: cut" in servers.on_disconnect(Address("a", 1), "cut", 0.1)
    assert list(servers.next_round()) == [Address("b", 2), Address("c", 3), Address("a", 1)]
    assert servers.explain_unavailable() == "no server at b:2, c:3, a:1: cut"


def test_a_server_that_answers_unavailable_is_no_missing_server():
    servers = ServerList([Address("a", 1)], 9)
    servers.on_failure("the server answered: no leader is known")
    servers.on_redirect(Address("a", 1), "")
    assert servers.explain_unavailable() == "no serving leader at a:1: the server answered: no leader is known"
    servers.on_failure("cut")
    assert servers.explain_unavailable() == "no server at a:1: cut"


class TestRedirects:
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
    def test_the_named_leader_is_tried_next(self, leaders, tried):
        servers = ServerList([Address("a", 1), Address("b", 1), Address("c", 1)], 10)
        order = []
        for node in servers.next_round():
            order.append(node.host)
            servers.on_redirect(node, leaders.get(node.host, ""))
        assert order == tried.split()

    def test_the_leader_is_reached_by_tls_if_the_follower_was(self):
        servers = ServerList([Address("a", 1, CONTEXT), Address("b", 1)], 10)
        tried = []
        for node in servers.next_round():
            tried.append(node)
            servers.on_redirect(node, {"a": "x:1", "x": "genie://y:1", "b": "z:1"}.get(node.host, ""))
        assert tried == [Address("a", 1, CONTEXT), Address("x", 1, CONTEXT), Address("b", 1), Address("z", 1)]

    def test_a_leader_named_before_the_disconnect_is_tried_first(self):
        servers = ServerList([Address("a", 1), Address("b", 1), Address("c", 1)], 10)
        servers.on_disconnect(Address("a", 1), "unavailable", 0.1)
        servers.on_redirect(Address("a", 1), "c:1")
        assert list(servers.next_round()) == [Address("c", 1), Address("b", 1), Address("a", 1)]
        assert list(servers.next_round()) == [Address("b", 1), Address("c", 1), Address("a", 1)]


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_an_invalid_connect_timeout(timeout):
    with pytest.raises(ValueError, match="connect_timeout"):
        ServerList([Address("a", 1)], timeout)


@pytest.mark.parametrize(
    ("message", "leader", "expected"),
    [
        ("no store", None, "no store"),
        ("not the leader", "b:1", "not the leader (the leader is b:1)"),
        ("not the leader; its leader is b:1", "b:1", "not the leader; its leader is b:1"),
    ],
)
def test_an_unavailable_server_names_the_leader_once(message, leader, expected):
    assert str(from_error_reply(Error.Payload("unavailable", message, leader=leader))) == expected
