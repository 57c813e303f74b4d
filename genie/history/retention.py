"""The retention of the history, and how the bytes of a directory are shared.

A server writes the raw files, and the archiver, which is another process, writes all others. Each process has its own
share of the bytes, so that both stay below the bound without coordination.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SEGMENT_BYTES: Final = 16 << 20
"""Maximum of `Retention.segment_bytes`."""
RESERVED_BYTES: Final = 16 << 10
"""Bytes that are reserved for what is always written: the first line of a file, gaps, and the key of redacted names."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of the history is kept, and for how long."""

    max_bytes: int = 10 << 30
    """The maximum size of all files."""
    max_age_s: float = 30 * 86_400.0
    """A file is deleted this long after its last event."""

    @property
    def raw_bytes(self) -> int:
        """Limit for the bytes of all raw files: the files that servers write, and the files that wait for the archiver."""
        return self.max_bytes // 4

    @property
    def archive_bytes(self) -> int:
        """Limit for the bytes of all other files: archives, indexes, snapshots, and the files that the archiver is writing."""
        return max(0, self.max_bytes - self.raw_bytes - RESERVED_BYTES)

    @property
    def snapshot_bytes(self) -> int:
        """Limit for the bytes of one snapshot, the requests that are carried into a file. A larger one is not recorded.

        A file is complete when its events have as many bytes as its snapshot. With this limit, both together fit into
        `raw_bytes`.
        """
        return self.max_bytes // 8

    @property
    def segment_bytes(self) -> int:
        """A file is complete when its events have this many bytes, and at least as many as its snapshot."""
        return min(SEGMENT_BYTES, self.max_bytes // 32)
