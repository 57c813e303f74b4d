"""From what somebody shows to a name with its rights."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from genie.access.principal import Principal
from genie.access.reading import EVERYTHING, Entry, check_token, read_file


class Access:
    """Everybody who may come in, by token and by certificate. Never changed: a file that is read again makes another.

    `certificates`: clients must show one. `seen_by_all`: the file may be read by everybody on this machine.
    """

    def __init__(self, entries: Iterable[Entry] = (), *, certificates: bool = False, seen_by_all: bool = False) -> None:
        entries = tuple(entries)
        self._by_digest = [(_digest(entry.token), entry.principal) for entry in entries if entry.token is not None]
        self._by_name = {entry.principal.name: entry.principal for entry in entries}
        self._with_token = {principal.name for _, principal in self._by_digest}
        self._certificates = certificates
        self.seen_by_all = seen_by_all

    @classmethod
    def read(cls, token: str | None, token_file: str | None, *, certificates: bool = False) -> Access:
        """By the settings. ValueError says what is wrong with them, or with the file."""
        if token is not None and token_file is not None:
            raise ValueError("GENIE_TOKEN and GENIE_TOKEN_FILE exclude each other: set one of them")
        if token is not None:
            return cls([Entry(EVERYTHING, check_token(token, "GENIE_TOKEN"))], certificates=certificates)
        if token_file is not None:
            found = read_file(token_file, certificates)
            return cls(found.entries, certificates=certificates, seen_by_all=found.seen_by_all)
        return cls(certificates=certificates)

    @property
    def tokens(self) -> bool:
        """Whether there are any."""
        return bool(self._by_digest)

    @property
    def open(self) -> bool:
        """Nothing is asked of anyone."""
        return not self._by_digest and not self._certificates

    def by_token(self, token: str) -> Principal | None:
        """Whose token this is; nobody's: None.

        How long it takes tells nothing: what is compared are digests, each as slowly as any other, and all of them.
        """
        said, found = _digest(token), None
        for digest, principal in self._by_digest:
            if hmac.compare_digest(digest, said):
                found = principal
        return found

    def by_certificate(self, name: str) -> Principal | None:
        """Whoever has shown a certificate of this name: as the file says, else one who may lock and look, everywhere.

        None where the name has a token: that is what proves it.
        """
        return None if name in self._with_token else self._by_name.get(name) or Principal(name)

    def by_name(self, name: str) -> Principal | None:
        """Whoever has proved this name by a token before, if it still has one."""
        return self._by_name[name] if name in self._with_token else None


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogatepass")).digest()
