"""Parsing of Redis URLs, and the errors of invalid ones, which never contain a part of the password."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.storage.redis.url import Address, Login, RedisUrl

NOWHERE = "/there/is/no/such/file"


@pytest.mark.parametrize(
    ("url", "kind", "nodes", "db", "master"),
    [
        ("redis://", "standalone", [("localhost", 6379)], 0, ""),
        ("redis://one", "standalone", [("one", 6379)], 0, ""),
        ("redis://one/", "standalone", [("one", 6379)], 0, ""),
        ("redis://one:7/3", "standalone", [("one", 7)], 3, ""),
        ("redis://[::1]:7/3", "standalone", [("::1", 7)], 3, ""),
        ("redis://one?db=4", "standalone", [("one", 6379)], 4, ""),
        ("unix:///run/redis.sock", "standalone", [("/run/redis.sock", 0)], 0, ""),
        ("unix:///run/redis.sock?db=2", "standalone", [("/run/redis.sock", 0)], 2, ""),
        ("redis+sentinel://a/locks", "sentinel", [("a", 26379)], 0, "locks"),
        ("redis+sentinel://a:1,b,[::1]:2,[fe80::1]/locks/5", "sentinel", [("a", 1), ("b", 26379), ("::1", 2), ("fe80::1", 26379)], 5, "locks"),
        ("redis+sentinel://a/my%2Flocks", "sentinel", [("a", 26379)], 0, "my/locks"),
        ("redis+cluster://a:1,b", "cluster", [("a", 1), ("b", 6379)], 0, ""),
        ("redis+cluster://a/", "cluster", [("a", 6379)], 0, ""),
        ("redis+cluster://a/0", "cluster", [("a", 6379)], 0, ""),
    ],
)  # fmt: skip
def test_a_url_is_parsed_to_nodes_and_database(
    url: str, kind: str, nodes: list[tuple[str, int]], db: int, master: str
) -> None:
    parsed = RedisUrl.parse(url)
    assert (parsed.kind, list(parsed.nodes), parsed.login.db, parsed.master) == (kind, nodes, db, master)
    assert parsed.login.tls is None
    assert parsed.login.password is None


@pytest.mark.parametrize("kind", ["redis://{}@a:1/2", "redis+sentinel://{}@a:1,b/locks/2", "redis+cluster://{}@a:1,b"])
@pytest.mark.parametrize(
    ("user", "login"),
    [
        ("me:secret", ("me", "secret")),
        (":secret", (None, "secret")),
        ("me:a%2Fb%3Fc%23d%40e%2Cf%3A", ("me", "a/b?c#d@e,f:")),
        ("me:with:colon", ("me", "with:colon")),
    ],
)
def test_credentials_are_decoded_and_not_shown(kind: str, user: str, login: tuple[str | None, str]) -> None:
    parsed = RedisUrl.parse(kind.format(user))
    assert (parsed.login.username, parsed.login.password) == login
    assert login[1] not in repr(parsed)
    assert parsed.sentinel_login.password is None, "sentinels have their own"


def test_sentinels_have_credentials_of_their_own() -> None:
    parsed = RedisUrl.parse("redis+sentinel://me:one@a/locks/3?sentinel_username=you&sentinel_password=o%26ther")
    assert parsed.login == Login("me", "one", 3)
    assert parsed.sentinel_login == Login("you", "o&ther", 0)
    assert "ther" not in repr(parsed).replace("other", "")


def test_tls_options_are_parsed(tmp_path: Path) -> None:
    for kind in ("rediss://a", "rediss+sentinel://a/locks", "rediss+cluster://a"):
        parsed = RedisUrl.parse(
            f"{kind}?ssl_cert_reqs=none&ssl_check_hostname=false&ssl_ca_path={tmp_path}&ssl_password=hush"
        )
        expected = {"ssl_cert_reqs": "none", "ssl_check_hostname": False, "ssl_ca_path": str(tmp_path)}
        assert parsed.login.tls == {**expected, "ssl_password": "hush"}
        assert "hush" not in repr(parsed)
        if parsed.kind == "sentinel":
            assert parsed.sentinel_login.tls == parsed.login.tls
    assert RedisUrl.parse("rediss://a").login.tls == {}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must begin with"),
        ("http://a", "must begin with"),
        ("redis:a", "must begin with"),
        ("unix+cluster:///a", "must begin with"),
        ("redis+other://a", r"ends with \+other"),
        ("redis://a,b", "several hosts"),
        ("redis://a:notaport", "host, port or options are invalid"),
        ("redis://a:70000", "host, port or options are invalid"),
        ("redis://a/locks", "the database, /NUMBER"),
        ("redis://a/1/2", "the database, /NUMBER"),
        ("redis://a/-1", "the database, /NUMBER"),
        ("redis://a?db=x", "host, port or options are invalid"),
        ("redis://a?timeout=5", "unknown option timeout"),
        ("redis://a?ssl_ca_certs=x", "ssl_ca_certs needs TLS: use rediss"),
        ("redis+sentinel://a", "must name the master"),
        ("redis+sentinel://a/", "must name the master"),
        ("redis+sentinel://a/locks/x", "the database, /NUMBER"),
        ("redis+sentinel:///locks", "host 1 must be HOST"),
        ("redis+sentinel://a,,b/locks", "host 2 must be HOST"),
        ("redis+sentinel://a,b:0/locks", "host 2 must be HOST"),
        ("redis+sentinel://a,b:70000/locks", "host 2 must be HOST"),
        ("redis+sentinel://::1/locks", "host 1 must be HOST"),
        ("redis+cluster://a/3", "no databases"),
        ("redis+cluster://a?db=3", "no databases"),
        ("redis+cluster://a?sentinel_password=x", "unknown option sentinel_password"),
        (f"rediss://a?ssl_ca_certs={NOWHERE}", f"ssl_ca_certs: {NOWHERE} does not exist"),
        ("rediss://a?ssl_cert_reqs=perhaps", "TLS options are invalid: .*perhaps"),
        ("rediss://a?ssl_min_version=7", "TLS options are invalid"),
        ("rediss://a?ssl_ciphers=none-such", "TLS options are invalid"),
        ("rediss://a?ssl_other=1", "unknown TLS option among ssl_other"),
    ],
)
def test_an_invalid_url_is_explained(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedisUrl.parse(url)


PASSWORDS_WITH_DELIMITERS = st.text(st.sampled_from("/?#@,:[]%=&℀\\ é"), min_size=1, max_size=4).map(
    lambda text: f"hun{text}ter2"
)


@given(st.sampled_from(["redis", "rediss", "redis+sentinel", "redis+cluster"]), PASSWORDS_WITH_DELIMITERS)
def test_no_part_of_a_password_is_in_an_error(scheme: str, password: str) -> None:
    """Not even if the password is not encoded, so that a part of it is parsed as something else."""
    for url in (f"{scheme}://me:{password}@a:1/locks", f"{scheme}://:{password}@a", f"{scheme}://me:{password},b/0"):
        error = error_text(url)
        assert "hun" not in error
        assert "ter2" not in error


def error_text(url: str) -> str:
    """Return the text of the error with which a URL is rejected; empty if it is valid."""
    try:
        RedisUrl.parse(url)
    except ValueError as error:
        return "".join(traceback.format_exception_only(error)) + str(error.__cause__ or "")
    return ""


def test_addresses_are_formatted() -> None:
    texts = [str(Address(*parts)) for parts in (("a", 1), ("::1", 2), ("/run/redis.sock", 0))]
    assert texts == ["a:1", "[::1]:2", "/run/redis.sock"]
