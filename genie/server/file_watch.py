"""Detects that the token file or a certificate was replaced, for example by Kubernetes, which mounts them as a Secret."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

Fingerprint = tuple[int, int, int] | None
"""Inode, time of modification and size of a file. None if the file cannot be read."""


class FileWatch:
    """Compares files at intervals, and calls `on_change` when one of them has changed.

    A watch by the operating system would miss how Kubernetes replaces a mounted Secret: by changing symbolic links.
    `paths` returns the paths of the files, which a reload of the settings may change.
    """

    def __init__(self, paths: Callable[[], Iterable[str]], on_change: Callable[[], None]) -> None:
        self._paths = paths
        self._on_change = on_change
        self._known = self._fingerprints()

    async def run(self, interval_s: float) -> None:
        """Compare the files every `interval_s`, until this task is cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            found = self._fingerprints()
            if found != self._known:
                self._known = found
                self._on_change()

    def _fingerprints(self) -> dict[str, Fingerprint]:
        return {path: _fingerprint(path) for path in self._paths()}


def _fingerprint(path: str) -> Fingerprint:
    """Return the fingerprint of a file, following symbolic links."""
    try:
        status = os.stat(path)  # noqa: PTH116 - the path of a setting
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
