"""Settings of the server, from the command line, the environment and a file (`cli/configuration.py`), in one group for each
consumer.

Each setting is an option of `genie serve`, a variable and a key of the file: `Limits.max_line` is `--max-line`,
`GENIE_MAX_LINE` and `max_line` in the section `[limits]`; `TlsSettings.cert` is `--tls-cert`, `GENIE_TLS_CERT` and `cert` in
the section `[tls]`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from genie.protocol.framing import MAX_LINE_BYTES

NAMESPACE = "genie"
"""The namespace of a server that is configured with none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the memory that clients can make a server use."""

    max_line: int = MAX_LINE_BYTES
    """Bytes of one line from a client."""
    max_connections: int = 20_000
    max_connections_per_address: int = 10_000
    max_requests_per_connection: int = 200_000
    """Held and waiting requests of one connection without a session."""
    max_requests_per_session: int = 100_000
    """Held and waiting requests of one session. Less than without a session: a resumption sends them all in one step."""
    max_queue: int = 1_000_000
    """Wait-queue entries of all resources. A request that waits for three resources has three entries."""
    max_locks: int = 4_000_000
    """Held locks in total. A request that holds three resources has three locks."""
    max_state: int = 4 << 30
    """Bytes of all held and waiting requests, sessions and watches, as `server.state_size` computes them."""
    max_state_per_principal: int = 0
    """Bytes of the requests, sessions and watches of one principal, if clients need a token. 0: half of `max_state`. See
    `principal_share`."""
    max_pending: int = 32 << 20
    """Bytes of queued commands of all connections. Beyond this limit the server stops reading (back pressure)."""
    max_partial: int = 64 << 20
    """Bytes of incomplete lines of all connections. Beyond this limit the server closes the connections with the most
    such bytes."""
    max_unread: int = 16 << 20
    """Output buffer limit of one connection, in bytes. A slow consumer that exceeds it is disconnected."""
    max_unread_total: int = 64 << 20
    """Bytes that the clients of all connections have not read, and of the queued commands of these clients. Beyond this limit
    the server closes the connections with the most such bytes."""

    @property
    def principal_share(self) -> float:
        """The share of one principal, if clients need a token: of `max_state`, `max_locks`, `max_queue` and retained
        replies.
        """
        if not self.max_state_per_principal:
            return 0.5
        return min(1.0, self.max_state_per_principal / self.max_state)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Paths of PEM files."""

    cert: str | None = None
    """The server's certificate. None: the server does not use TLS."""
    key: str | None = None
    """The private key of the server's certificate. None: the certificate file also contains the key."""
    ca: str | None = None
    """Certificate authorities that sign the certificates of clients. None: clients need no certificate."""


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The store of the locks, and how durable a commit must be."""

    url: str | None = field(default=None, repr=False)
    """None: locks are kept in memory and end with the process."""
    min_replicas: int = 0
    """Number of Redis replicas that must acknowledge a commit before the server acknowledges it."""
    fsync: bool = False
    """True if Redis and its `min_replicas` replicas must fsync a commit before the server acknowledges it."""
    allow_data_loss: bool = False
    """True: start although the configuration of Redis breaks what the other settings promise."""


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The admin port: HTTP for operators."""

    host: str = "127.0.0.1"
    port: int | None = 7078
    """None: no admin port."""


@dataclass(frozen=True, slots=True)
class HistorySettings:
    """The history: who asked for which lock, waited and held it, in files."""

    dir: str | None = None
    """Directory of the files. None: no history is recorded."""
    max_mb: int = 10_240
    """Megabytes (MiB) of complete files that are kept for each namespace."""
    max_days: float = 30.0
    """Days for which a complete file is kept."""
    redact: str | None = None
    """Prefixes of names that are recorded as a digest, separated by commas."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a server. `from_options` makes them from the flat names of `genie serve`."""

    # More than 16 fields: settings that several modules read are groups of their own, these are the others.
    host: str = "127.0.0.1"
    port: int = 7077
    namespaces: tuple[str, ...] = (NAMESPACE,)
    """The namespaces that this server serves. Each namespace has its own leader. A client whose `hello` contains no
    namespace uses the first one."""
    advertise: str | None = None
    """HOST:PORT at which clients reach this server. None: the address at which it listens, or the host name if it listens
    at all addresses."""
    token: str | None = field(default=None, repr=False)
    """The token that clients must present. If neither `token` nor `token_file` is set, clients need no token."""
    token_file: str | None = None
    """Path of a file with one token, or with a section for each principal."""
    reload_interval: float = 0.0
    """Seconds between two checks whether the token file or a certificate has changed, and must be reloaded. 0: never."""
    insecure: bool = False
    """True: allow unauthenticated access on non-loopback addresses."""
    lease: float = 3.0
    """Seconds for which a server remains the leader of a namespace after a commit. Then another server may take over."""
    slow_wait: float = 1.0
    """Seconds after which a waiting request is logged. 0: never."""
    lock_order: str = "on"
    """`on`: the server finds locks that transactions take in both orders. `off`: it does not."""
    lock_order_rules: str | None = None
    """Patterns of names that form a class, separated by commas, as `core.lock_order.classes.parse_rules` reads them."""
    store_timeout_ms: int = 2_000
    """A commit without an answer for this time counts as a store outage: the server rejects queued commands."""
    drain_timeout_ms: int = 5_000
    """How long a graceful shutdown waits for the last commit, and for the clients to receive their replies."""
    log_level: str = "info"
    log_format: str = "auto"
    limits: Limits = field(default_factory=Limits)
    tls: TlsSettings = field(default_factory=TlsSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    history: HistorySettings = field(default_factory=HistorySettings)

    @classmethod
    def from_options(cls, **options: Any) -> Settings:
        """Make settings from flat option names. Raises TypeError for an unknown name.

        A setting of the group `limits`, or of no group, has the name of its field: `max_line`, `port`. A setting of another
        group has the group as a prefix: `redis_url` is the field `url` of the group `redis`.
        """
        group_values: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
        for name in options.keys() & _GROUP_AND_FIELD.keys():
            group, field_name = _GROUP_AND_FIELD[name]
            group_values[group][field_name] = options.pop(name)
        return cls(**options, **{group: GROUPS[group](**values) for group, values in group_values.items()})

    def options(self) -> dict[str, Any]:
        """Return every setting by its flat option name: the inverse of `from_options`."""
        values = asdict(self)
        groups = {group: values.pop(group) for group in GROUPS}
        return values | {name: groups[group][field_name] for name, (group, field_name) in _GROUP_AND_FIELD.items()}


GROUPS: dict[str, type[Any]] = {
    "limits": Limits,
    "tls": TlsSettings,
    "redis": RedisSettings,
    "admin": AdminSettings,
    "history": HistorySettings,
}

_GROUP_AND_FIELD: dict[str, tuple[str, str]] = {
    setting.name if group == "limits" else f"{group}_{setting.name}": (group, setting.name)
    for group, group_type in GROUPS.items()
    for setting in fields(group_type)
}
"""The group and the field of each flat option name."""

SECRETS = frozenset({"token", "redis_url"})
"""Flat names of the settings that are or contain a secret."""

RELOADABLE = frozenset(
    {
        "log_level",
        "slow_wait",
        "token",
        "token_file",
        "tls_cert",
        "tls_key",
        "tls_ca",
        "max_connections",
        "max_connections_per_address",
    }
)
"""Flat names of the settings that a running server can change (`Server.reload`). The others need a restart."""


def file_key(option: str) -> str:
    """Return the TOML key of an option in the configuration file: `limits.max_line`, or `port` for an option without a
    section.
    """
    group, name = _GROUP_AND_FIELD.get(option) or ("", option)
    # `redis_host` and `redis_port` have no field: `genie.cli.configuration` combines them into `redis_url`.
    if not group and option.startswith("redis_"):
        group, name = "redis", option.removeprefix("redis_")
    return f"{group}.{name}" if group else name
