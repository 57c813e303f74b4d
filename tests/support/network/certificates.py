"""Certificates made for a test, as files."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


class Certificates:
    """A CA in a folder, and what it signs: each in a file of its own, its key with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.server = self.issue("server", "127.0.0.1", "localhost")

    def issue(
        self,
        file: str,
        *names: str,
        common_name: str | None = None,
        expired: bool = False,
        until: datetime | None = None,
    ) -> Path:
        """Sign one for these names; again for the same file takes its place."""
        if expired:
            until = datetime.now(UTC) - timedelta(days=1)
        made = self.authority.issue_cert(
            *names, common_name=common_name, **({} if until is None else {"not_after": until})
        )
        path = self.folder / f"{file}.pem"
        path.unlink(missing_ok=True)
        made.private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    def context(self, shown: Path | None = None) -> ssl.SSLContext:
        """What a client goes by that trusts this CA, and shows this certificate."""
        made = ssl.create_default_context(cafile=str(self.ca))
        if shown is not None:
            made.load_cert_chain(str(shown))
        return made
