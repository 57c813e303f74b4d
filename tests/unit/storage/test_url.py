"""What a URL of Redis says, and what is said of one that is wrong: never a part of its password."""

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
def test_what_it_says(url: str, kind: str, nodes: list[tuple[str, int]], db: int, master: str) -> None:
    read = RedisUrl.parse(url)
    assert (read.kind, list(read.nodes), read.login.db, read.master) == (kind, nodes, db, master)
    assert read.login.tls is None
    assert read.login.password is None


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
def test_who_it_logs_in_as(kind: str, user: str, login: tuple[str | None, str]) -> None:
    read = RedisUrl.parse(kind.format(user))
    assert (read.login.username, read.login.password) == login
    assert login[1] not in repr(read)
    assert read.sentinel_login.password is None, "sentinels have their own"


def test_sentinels_have_a_password_of_their_own() -> None:
    read = RedisUrl.parse("redis+sentinel://me:one@a/locks/3?sentinel_username=you&sentinel_password=o%26ther")
    assert read.login == Login("me", "one", 3)
    assert read.sentinel_login == Login("you", "o&ther", 0)
    assert "ther" not in repr(read).replace("other", "")


def test_options_of_tls(tmp_path: Path) -> None:
    for kind in ("rediss://a", "rediss+sentinel://a/locks", "rediss+cluster://a"):
        read = RedisUrl.parse(
            f"{kind}?ssl_cert_reqs=none&ssl_check_hostname=false&ssl_ca_path={tmp_path}&ssl_password=hush"
        )
        expected = {"ssl_cert_reqs": "none", "ssl_check_hostname": False, "ssl_ca_path": str(tmp_path)}
        assert read.login.tls == {**expected, "ssl_password": "hush"}
        assert "hush" not in repr(read)
        if read.kind == "sentinel":
            assert read.sentinel_login.tls == read.login.tls
    assert RedisUrl.parse("rediss://a").login.tls == {}


@pytest.mark.parametrize(
    ("url", "says"),
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
        ("redis://a?timeout=5", "timeout is no option"),
        ("redis://a?ssl_ca_certs=x", "ssl_ca_certs is no option without TLS"),
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
        ("redis+cluster://a?sentinel_password=x", "sentinel_password is no option"),
        (f"rediss://a?ssl_ca_certs={NOWHERE}", f"ssl_ca_certs: {NOWHERE} does not exist"),
        ("rediss://a?ssl_cert_reqs=perhaps", "TLS options are invalid: .*perhaps"),
        ("rediss://a?ssl_min_version=7", "TLS options are invalid"),
        ("rediss://a?ssl_ciphers=none-such", "TLS options are invalid"),
        ("rediss://a?ssl_other=1", "unknown TLS option among ssl_other"),
    ],
)
def test_what_is_wrong_with_it(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RedisUrl.parse(url)


HARD = st.text(st.sampled_from("/?#@,:[]%=&℀\\ é"), min_size=1, max_size=4).map(lambda text: f"hun{text}ter2")


@given(st.sampled_from(["redis", "rediss", "redis+sentinel", "redis+cluster"]), HARD)
def test_no_part_of_a_password_is_repeated(scheme: str, password: str) -> None:
    """Also where it was written as it is, and so is read as something else."""
    for url in (f"{scheme}://me:{password}@a:1/locks", f"{scheme}://:{password}@a", f"{scheme}://me:{password},b/0"):
        said = complaint(url)
        assert "hun" not in said
        assert "ter2" not in said


def complaint(url: str) -> str:
    """All that would be shown of the error; nothing where there is none."""
    try:
        RedisUrl.parse(url)
    except ValueError as error:
        return "".join(traceback.format_exception_only(error)) + str(error.__cause__ or "")
    return ""


def test_how_an_address_is_written() -> None:
    said = [str(Address(*parts)) for parts in (("a", 1), ("::1", 2), ("/run/redis.sock", 0))]
    assert said == ["a:1", "[::1]:2", "/run/redis.sock"]
