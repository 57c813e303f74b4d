"""Settings of the server: one frozen value, from the environment and the command line (`cli/serve.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from genie.protocol.framing import MAX_LINE

NAMESPACE = "genie"
"""That of a server which was told none."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server runs. Each field is an option of `genie serve` and, in capitals behind `GENIE_`, a variable."""

    host: str = "127.0.0.1"
    port: int = 7077
    namespaces: tuple[str, ...] = (NAMESPACE,)
    """What this server leads, or follows who does, each by itself. Who says none is in the first."""
    redis_url: str | None = field(default=None, repr=False)
    """None: the locks are kept in memory."""
    redis_min_replicas: int = 0
    """Replicas of Redis that must have a commit before it counts as stored."""
    redis_fsync: bool = False
    """Whether it must be on the disk of Redis, and of those replicas, before that."""
    advertise: str | None = None
    """HOST:PORT at which clients reach this server. None: where it listens, under the host's name if that is everywhere."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = 7078
    """Where operators look: HTTP. None: nowhere."""
    slow_wait: float = 1.0
    """Seconds after which a request that still waits is told of in the log. 0: none is."""
    token: str | None = field(default=None, repr=False)
    """What clients must say first. None, as long as there is no `token_file` either: nothing."""
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    """Who signs the certificates that clients must show. None: they need none."""
    insecure: bool = False
    """Whether strangers may be let in from beyond the loopback."""
    lease: float = 3.0
    """Seconds for which a server leads its namespace from each commit on. When they are over, another may."""
    log_level: str = "info"
    log_format: str = "auto"
    max_line: int = MAX_LINE
    """Bytes in one line of the wire."""
    max_connections: int = 20_000
    max_connections_per_address: int = 10_000
    max_requests_per_connection: int = 200_000
    """Requests held and waiting of one connection without a session."""
    max_requests_per_session: int = 100_000
    """The same of one session: when it is resumed it is told of all of them in one step."""
    max_queue: int = 1_000_000
    """Places in the lines of all resources. A request that waits for three resources has three."""
    max_locks: int = 4_000_000
    """Locks held, in all. A request that holds three resources has three."""
    max_pending: int = 32 << 20
    """Bytes of commands that wait for the store, in all. Beyond it nothing more is read."""
    max_partial: int = 64 << 20
    """Bytes of incomplete lines, of all connections together. Beyond it those with the most are closed."""
    max_unread: int = 16 << 20
    """Bytes that wait for a client to read them. One that leaves more unread is cut off."""
    store_timeout_ms: int = 2_000
    """How long the store may take before commands that wait for it are refused as `unavailable`."""
    drain_timeout_ms: int = 5_000
    """How long a stopping server waits for its last commit."""
