"""The first lines of `genie serve` on a terminal: where clients connect, where the page is, where locks are kept."""

from __future__ import annotations

from collections.abc import Iterator

from genie.cli.options import source_of
from genie.config import Settings
from genie.storage.store import this_node


def banner_lines(
    settings: Settings, listening: tuple[str, int], admin_listening: tuple[str, int] | None
) -> Iterator[str]:
    """Yield the lines of the banner.

    `listening` and `admin_listening` are the host and the port on which the server listens for clients, and on which its
    admin port listens. `admin_listening` is None without an admin port.
    """
    is_tls = settings.tls.cert is not None
    yield f"Clients connect to {'genies://' if is_tls else ''}{_reachable(listening, settings.advertise)}."
    if admin_listening is None:
        yield f"No status page: {source_of('admin_port')} is empty."
    else:
        yield f"Status page: {'https' if is_tls else 'http'}://{_reachable(admin_listening)}/"
    if settings.redis.url is None:
        yield "Locks are kept in memory: they are lost when this process ends."
    else:
        yield f"Locks are kept in Redis {_describe_redis(settings.redis.url)}."


def _reachable(listening: tuple[str, int], advertise: str | None = None) -> str:
    """Return the `HOST:PORT` at which others reach a server: with the host name if the server listens on all interfaces."""
    return this_node(listening, advertise, lease_ms=0).address  # the address does not depend on the lease


def _describe_redis(redis_url: str) -> str:
    """Describe where Redis is, without the credentials. The text continues "Locks are kept in Redis"."""
    from genie.storage.redis.url import RedisUrl  # noqa: PLC0415 - slow to import, and not needed without Redis

    url = RedisUrl.parse(redis_url)
    nodes = ", ".join(map(str, url.nodes))
    database = f", database {url.login.db}" if url.login.db else ""
    if url.kind == "sentinel":
        return f"{url.master!r} of the sentinels at {nodes}{database}"
    if url.kind == "cluster":
        return f"Cluster at {nodes}{database}"
    return f"at {nodes}{database}"
