"""Redis URLs: of one server, of the sentinels that report the current primary, or of some nodes of a cluster.

- `redis://[user:password@]host[:port][/db]`, `unix:///path`
- `redis+sentinel://[user:password@]host[:port],host[:port],.../master-name[/db]`
- `redis+cluster://[user:password@]host[:port],...`

With `rediss` in place of `redis`, the connections use TLS. The query may have redis-py's TLS options
(`?ssl_ca_certs=...`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from redis import RedisError
from redis.asyncio.connection import SSLConnection, parse_url

from genie.net import parse_host_port

Kind = Literal["standalone", "sentinel", "cluster"]

FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
"""TLS options whose value is the path of a file or directory, which must exist."""
DATABASE = re.compile("(/[0-9]*)?")
ENCODING_HINT = "in a user or password, write / ? # @ and , as %2F %3F %23 %40 and %2C"
SENTINEL_PORT = 26379
REDIS_PORT = 6379


class Address(NamedTuple):
    """The address of a Redis. With port 0, `host` is the path of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return `host:port`, with brackets around an IPv6 host, or the path of the Unix socket."""
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials, database and TLS of a connection."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: dict[str, Any] | None = field(default=None, repr=False)
    """The options of redis-py's SSLConnection. None for a connection without TLS."""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed Redis URL."""

    kind: Kind
    nodes: tuple[Address, ...]
    """The server itself, or the sentinels or cluster nodes that report the primary."""
    login: Login
    """The login for Redis."""
    master: str = ""
    """The name of the primary in the configuration of the sentinels. Empty without sentinels."""
    sentinel_login: Login = Login()
    """The login for the sentinels, from the options `sentinel_username` and `sentinel_password`."""

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Parse a URL. Raises ValueError if the URL is invalid, with a message that never contains a password."""
        scheme, separator, rest = url.partition("://")
        base, _, kind = scheme.partition("+")
        is_known = base in ("redis", "rediss") or scheme == "unix"
        if not separator or not is_known:
            raise ValueError(
                "the Redis URL must begin with redis://, redis+sentinel:// or redis+cluster:// (rediss for TLS), or unix://"
            )
        if kind not in ("", "sentinel", "cluster"):
            raise ValueError(
                f"the Redis URL: the scheme ends with +{kind}, and only +sentinel and +cluster are allowed"
            )
        if base == "unix":
            return _standalone(_options(url))
        return _PARSERS[kind](base, rest)


def _single_server(base: str, rest: str) -> RedisUrl:
    """Parse the URL of a single server. `base` is `redis` or `rediss`, `rest` is the text after `://`."""
    authority = rest.partition("/")[0]
    hosts = authority.rpartition("@")[2]
    if "," in hosts:
        raise ValueError("the Redis URL: several hosts need redis+sentinel:// or redis+cluster://")
    return _standalone(_options(f"{base}://{rest}"))


def _standalone(options: dict[str, Any]) -> RedisUrl:
    """Build the RedisUrl of one server from the options that redis-py has parsed.

    The option `path` is a Unix socket.
    """
    path = options.pop("path", None)
    if path is not None:
        return RedisUrl("standalone", (Address(path, 0),), _login(options))
    host, port = options.pop("host", "localhost"), options.pop("port", REDIS_PORT)
    return RedisUrl("standalone", (Address(host, port),), _login(options))


def _sentinels(base: str, rest: str) -> RedisUrl:
    """Parse a URL with `+sentinel`. `base` is `redis` or `rediss`, `rest` is the text after `://`."""
    user, nodes, path, query = _split(rest, SENTINEL_PORT)
    master, _, db = path.partition("/")
    if not master:
        raise ValueError("the Redis URL must name the master: redis+sentinel://host,host,host/master-name")
    options = _options(f"{base}://{user}sentinel/{db}{query}")  # redis-py parses one host only: use a placeholder
    username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
    login = _login({key: value for key, value in options.items() if key not in ("host", "port")})
    sentinel_login = replace(login, username=username, password=password, db=0)
    return RedisUrl("sentinel", nodes, login, unquote(master), sentinel_login)


def _cluster(base: str, rest: str) -> RedisUrl:
    """Parse a URL with `+cluster`. `base` is `redis` or `rediss`, `rest` is the text after `://`."""
    user, nodes, path, query = _split(rest, REDIS_PORT)
    options = _options(f"{base}://{user}cluster/{query}")  # redis-py parses one host only: use a placeholder
    login = _login({key: value for key, value in options.items() if key != "host"})
    if path not in ("", "0") or login.db:
        raise ValueError("the Redis URL: a cluster has no databases except 0, and no master-name")
    return RedisUrl("cluster", nodes, login)


_PARSERS = {"": _single_server, "sentinel": _sentinels, "cluster": _cluster}


def _split(rest: str, default_port: int) -> tuple[str, tuple[Address, ...], str, str]:
    """Split the text after `://` of a URL with several hosts.

    Returns the credentials including the `@`, the nodes, the path without its first and last slash, and the query
    including the `?`.
    """
    before, question, query = rest.partition("?")
    authority, _, path = before.partition("/")
    user, at, hosts = authority.rpartition("@")
    nodes = tuple(_address(text, default_port, number) for number, text in enumerate(hosts.split(","), 1))
    return user + at, nodes, path.rstrip("/"), question + query


def _address(text: str, default_port: int, number: int) -> Address:
    """Parse one host of a URL, `HOST` or `HOST:PORT`, which is the host with this number in the URL, from 1.

    The error message contains only the number, because the text could be part of a password.
    """
    try:
        host, own_port = parse_host_port(text)
    except ValueError:
        host, own_port = "", None
    is_bare_ipv6 = ":" in host and not text.startswith("[")
    has_colon_without_port = own_port is None and not text.endswith((host, "]"))
    if not host or is_bare_ipv6 or has_colon_without_port:
        raise ValueError(
            f"the Redis URL: host {number} must be HOST, HOST:PORT, [IPv6] or [IPv6]:PORT; {ENCODING_HINT}"
        )
    return Address(host, own_port or default_port)


def _options(url: str) -> dict[str, Any]:
    """Return the options that redis-py parses from the URL of one server. For a Unix socket, the option `path` is set.

    Raises ValueError if the URL is invalid. The messages of redis-py are replaced, because they could contain a
    password.
    """
    try:
        options = dict(parse_url(url))
        parsed = urlsplit(url)
    except ValueError:
        raise ValueError(f"the Redis URL: its host, port or options are invalid; {ENCODING_HINT}") from None
    if "path" not in options and not DATABASE.fullmatch(parsed.path):
        raise ValueError(
            f"the Redis URL: after the host only the database, /NUMBER, and ?options are allowed; {ENCODING_HINT}"
        )
    return options


def _login(options: dict[str, Any]) -> Login:
    """Build the Login from options that redis-py has parsed.

    Raises ValueError if an option is unknown, needs TLS without `rediss`, or is not accepted by the TLS library.
    """
    unknown = dict(options)
    has_tls = unknown.pop("connection_class", None) is SSLConnection
    tls = {key: unknown.pop(key) for key in options if key.startswith("ssl_")}
    login = Login(unknown.pop("username", None), unknown.pop("password", None), int(unknown.pop("db", 0)))
    # An @ after the ? suggests a password with an unescaped ?, so the options must not be repeated in an error message.
    if unknown and any("@" in str(value) for value in (unknown | tls).values()):
        raise ValueError(f"the Redis URL: the text after the ? must be options, and contains an @; {ENCODING_HINT}")
    if unknown:
        raise ValueError(f"the Redis URL: unknown option {', '.join(sorted(unknown))}")
    if not has_tls:
        if tls:
            raise ValueError(f"the Redis URL: {', '.join(sorted(tls))} needs TLS: use rediss://")
        return login
    for name in FILES:
        if name in tls and not Path(tls[name]).exists():
            raise ValueError(f"the Redis URL: {name}: {tls[name]} does not exist")
    try:
        SSLConnection(**tls).ssl_context.get()
    except TypeError:
        raise ValueError(f"the Redis URL: unknown TLS option among {', '.join(sorted(tls))}") from None
    except (RedisError, ValueError, OSError) as error:
        raise ValueError(f"the Redis URL: its TLS options are invalid: {error}") from None
    return replace(login, tls=tls)
