"""Redaction: secret names are recorded as a prefix and a keyed digest.

A search finds them only if it can read the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from genie.files import read_regular_file
from genie.history import records
from genie.lock_modes import WHOLE_NAMESPACE, is_subtree

KEY_BYTES: Final = 32
SUBTREE_ENDING: Final = f"/{WHOLE_NAMESPACE}"
"""The end of a subtree, which stays after the digest: the redacted name means a subtree, too."""


def redaction_key(directory: Path, *, create: bool = True) -> bytes:
    """Return the key of the redacted names in a directory, which only the owner can read.

    A missing key is created if `create`, else FileNotFoundError is raised. Raises ValueError if the key is damaged: the
    digests of a shortened key could be guessed.
    """
    path = directory / "redaction.key"
    if create and not path.exists():
        _create_key(path)
    key, _ = read_regular_file(str(path))
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} is damaged, restore it from a backup: it has {len(key)} bytes, not {KEY_BYTES}")
    return key


def _create_key(path: Path) -> None:
    """Write a new key durably, unless another server writes one first."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):  # another server was first
        os.link(temporary, path)
    temporary.unlink()


def name_digest(key: bytes, name: str) -> str:
    """Return `#` and 16 hexadecimal digits of the keyed digest of a name.

    A redacted name is its prefix and this text.
    """
    return f"#{hmac.new(key, name.encode(), hashlib.sha256).hexdigest()[:16]}"


def recorded_names(directory: Path, name: str) -> set[str]:
    """Return all texts that may be recorded for a name: the name itself, and its redactions if the key can be read."""
    try:
        digest = name_digest(redaction_key(directory, create=False), name)
    except (OSError, ValueError):  # nothing is redacted, or the reader may not read the key
        return {name}
    ending = SUBTREE_ENDING if is_subtree(name) else ""
    prefixes = (name[:length] for length in range(1, len(name) + 1))  # any of them may have been configured
    return {name, *(f"{prefix}{digest}{ending}" for prefix in prefixes)}


class Redaction:
    """Redacts the names that begin with one of the `prefixes`, and removes the notes of their requests.

    Equal names stay equal, so a replay makes the same decisions, unless a request names a subtree below a redacted
    prefix: the redacted subtree contains none of the redacted names. The subtree of the prefix itself is recorded
    unchanged.
    """

    def __init__(self, prefixes: Sequence[str], key: bytes) -> None:
        self.prefixes, self._key = tuple(prefixes), key

    def redact(self, name: str) -> str:
        """Return a name as it is recorded: unchanged, or as its redacted prefix and its digest.

        A redacted subtree keeps its ending `/**`.
        """
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        if prefix is None:
            return name
        if not is_subtree(name):
            return prefix + name_digest(self._key, name)
        if name == prefix + WHOLE_NAMESPACE:  # contains no secret
            return name
        return prefix + name_digest(self._key, name) + SUBTREE_ENDING

    def redact_line(self, line: records.Line) -> records.Line:
        """Redact the names of a line in place, and return the line. A request with a redacted name loses its note."""
        if not self.prefixes:
            return line
        if isinstance(line, records.Queued):  # also Granted and Carried
            self._redact_request(line)
        if isinstance(line, (records.Carried, records.Moved)) and line.positions is not None:
            line.positions = {self.redact(name): position for name, position in line.positions.items()}
        if isinstance(line, records.Released):
            # An owner is the name of a transaction, or the id of a request without one.
            line.cycle = tuple([self.redact(owner) if isinstance(owner, str) else owner for owner in line.cycle])
        return line

    def _redact_request(self, request: records.Queued) -> None:
        """Redact the resources and the transaction of a request. If one of these names changes, remove the note."""
        before = request.names, request.transaction
        request.exclusive = tuple(map(self.redact, request.exclusive))
        request.shared = tuple(map(self.redact, request.shared))
        if request.units:
            request.units = {self.redact(name): units for name, units in request.units.items()}
        if request.transaction is not None:
            request.transaction = self.redact(request.transaction)
        if (request.names, request.transaction) != before:
            request.note = None
