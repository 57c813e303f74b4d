"""The first lines of `genie serve`: addresses that others can use, and a Redis without its credentials."""

from __future__ import annotations

import socket

import pytest

from genie.cli.banner import banner_lines
from genie.config import RedisSettings, Settings, TlsSettings

LISTENING = ("127.0.0.1", 7077)


def test_a_server_with_a_certificate_is_reached_by_tls() -> None:
    clients, page, _ = banner_lines(Settings(tls=TlsSettings(cert="server.pem")), LISTENING, ("::1", 7078))
    assert clients == "Clients connect to genies://127.0.0.1:7077."
    assert page == "Status page: https://[::1]:7078/"


def test_an_address_on_all_interfaces_is_shown_with_the_host_name() -> None:
    clients, page, _ = banner_lines(Settings(), ("::", 7077), ("::", 7078))
    assert clients == f"Clients connect to {socket.gethostname()}:7077."
    assert page == f"Status page: http://{socket.gethostname()}:7078/"


def test_clients_connect_to_the_advertised_address() -> None:
    clients, _, _ = banner_lines(Settings(advertise="genie.example:80"), LISTENING, None)
    assert clients == "Clients connect to genie.example:80."


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://genie:secret@redis.example", "Redis at redis.example:6379"),
        ("unix:///run/redis.sock", "Redis at /run/redis.sock"),
        (
            "redis+sentinel://u:secret@one,two/main/2",
            "Redis 'main' of the sentinels at one:26379, two:26379, database 2",
        ),
        ("redis+cluster://u:secret@one,two:7000", "Redis Cluster at one:6379, two:7000"),
    ],
)
def test_redis_is_shown_without_its_credentials(url: str, shown: str) -> None:
    *_, store = banner_lines(Settings(redis=RedisSettings(url=url)), LISTENING, None)
    assert store == f"Locks are kept in {shown}."
