"""Settings of the server: one frozen value, from the environment and the command line (`cli/serve.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from genie.protocol.framing import MAX_LINE


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server runs. Each field is an option of `genie serve` and, in capitals behind `GENIE_`, a variable."""

    host: str = "127.0.0.1"
    port: int = 7077
    namespace: str = "genie"
    redis_url: str | None = None
    """None: the locks are kept in memory."""
    advertise: str | None = None
    """HOST:PORT at which clients reach this server. None: where it listens, under the host's name if that is everywhere."""
    lease: float = 3.0
    """Seconds for which a server leads its namespace from each commit on. When they are over, another may."""
    log_level: str = "info"
    log_format: str = "auto"
    max_line: int = MAX_LINE
    """Bytes in one line of the wire."""
    max_connections: int = 20_000
    max_requests: int = 4_000_000
    """Requests held and waiting, in all."""
    max_pending: int = 32 << 20
    """Bytes of commands that wait for the store, in all. Beyond it nothing more is read."""
    max_unread: int = 16 << 20
    """Bytes that wait for a client to read them. One that leaves more unread is cut off."""
    store_timeout_ms: int = 2_000
    """How long the store may take before commands that wait for it are refused as `unavailable`."""
    drain_timeout_ms: int = 5_000
    """How long a stopping server waits for its last commit."""
