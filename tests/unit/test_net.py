"""Parsing of addresses, and the backoff between retries."""

from __future__ import annotations

import socket

import pytest

from genie.backoff import Backoff
from genie.net import bind_all, format_host_port, local_addresses, parse_host_port


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h", ("h", None)),
        ("h:1", ("h", 1)),
        ("h:", ("h", None)),
        (":65535", ("", 65535)),
        ("[::1]", ("::1", None)),
        ("[::1]:7", ("::1", 7)),
        ("fe80::1", ("fe80::1", None)),
    ],
)
def test_an_address_is_split_into_host_and_port(text, expected):
    assert parse_host_port(text) == expected


@pytest.mark.parametrize("text", ["h:0", "h:65536", "h:x", "h:-1", "h:\uff11", "[::1", "[::1]7", "h:" + "9" * 5000])
def test_a_wrong_port_or_bracket_is_an_error(text):
    with pytest.raises(ValueError, match=r"port|ADDRESS"):
        parse_host_port(text)


def test_an_ipv6_address_is_formatted_in_brackets():
    assert format_host_port("::1", 7) == "[::1]:7"
    assert format_host_port("h", 7) == "h:7"


def test_every_address_of_a_host_gets_a_socket(monkeypatch):
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (f"127.0.0.{number}", 0)) for number in (1, 2, 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    sockets = bind_all("h", 0)
    assert [sock.getsockname()[0] for sock in sockets] == ["127.0.0.1", "127.0.0.2"]
    for sock in sockets:
        sock.close()


def test_an_address_in_use_closes_the_sockets_of_the_other_addresses(monkeypatch):
    # Addresses of this test alone: another process may use the same port of 127.0.0.1.
    free, taken = "127.94.0.1", "127.94.0.2"
    with socket.create_server((taken, 0)) as used:
        port = used.getsockname()[1]
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in (free, taken)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        with pytest.raises(OSError, match="in use"):
            bind_all("h", port)
        socket.create_server((free, port)).close()


def test_a_backoff_doubles_up_to_its_maximum_and_restarts_after_a_reset():
    backoff = Backoff(1, 4)
    for ceiling in (1, 2, 4, 4):
        assert ceiling / 2 <= backoff.next_delay() <= ceiling
    backoff.reset()
    assert backoff.next_delay() <= 1


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".b"])
def test_a_text_that_cannot_be_a_host_name_is_an_oserror(host: str) -> None:
    with pytest.raises(OSError, match="not a host name"):
        local_addresses(host, 0)
