"""A name, and what it may do."""

from __future__ import annotations

import hmac
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from stat import S_IROTH
from typing import Any, Final

LOCK: Final = "lock"
"""`request`, `release`, `extend`, and sessions."""
INSPECT: Final = "inspect"
"""`inspect` and `watch`, and what the admin port shows."""
ADMIN: Final = "admin"
"""Everything, also to release what others hold."""
RIGHTS: Final = (LOCK, INSPECT, ADMIN)

USUAL: Final = frozenset((LOCK, INSPECT))
"""What a name may do of which nothing else is said."""

MOST_SHOWN = 10
"""Prefixes that are named to somebody who asked for another name."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who has proved a name. `prefixes` are how the names of resources must begin; None: in any way."""

    name: str
    prefixes: tuple[str, ...] | None = None
    rights: frozenset[str] = USUAL

    def may(self, right: str) -> bool:
        """Whether it has a right; who has `admin` has them all."""
        return right in self.rights or ADMIN in self.rights

    def covers(self, name: str) -> bool:
        """Whether it may lock a resource of this name, or watch what begins so."""
        return self.prefixes is None or name.startswith(self.prefixes)

    @property
    def bounds(self) -> tuple[str, ...] | None:
        """How the names begin that it may see; None: in any way. Who has `admin` may see everything."""
        return None if ADMIN in self.rights else self.prefixes

    @property
    def reach(self) -> str:
        """Its prefixes, for people."""
        if self.prefixes is None:
            return "any name"
        shown = ", ".join(repr(prefix) for prefix in self.prefixes[:MOST_SHOWN])
        more = len(self.prefixes) - MOST_SHOWN
        return f"names that begin with {shown}" + (f" or {more} more" if more > 0 else "")


# -- The file of tokens: one word, or TOML with a section for each name --------

DEFAULT = "default"
"""The name of whoever has the one token that there is."""
EVERYTHING = Principal(DEFAULT, rights=frozenset(RIGHTS))

MIN_TOKEN = 16
MAX_TOKEN = 1024
"""Characters in a token."""
MAX_NAME = 128
"""Characters in the name of a section."""
MAX_PREFIX = 512
"""Characters in a prefix: as many as the name of a resource may have."""
MAX_FILE = 1 << 20
"""Bytes of the file."""

KEYS = ("token", "prefixes", "may")
_WHERE = re.compile(r" \(at .*\)$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Entry:
    """A name with its token; None: only a certificate proves it."""

    principal: Principal
    token: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a file says. `seen_by_all`: everybody on this machine may read it."""

    entries: tuple[Entry, ...]
    seen_by_all: bool


def read_file(path: str, certificates: bool) -> Found:
    """Read and check a file. `certificates`: clients show some, so that a name need have no token.

    ValueError says what is wrong and what would be right.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
            seen_by_all = bool(Path(path).stat().st_mode & S_IROTH)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} must be text in UTF-8") from None
    if len(data) > MAX_FILE:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} must have at most {MAX_FILE} bytes")
    try:
        return Found(tuple(_entries(text, certificates)), seen_by_all)
    except ValueError as error:
        raise ValueError(f"GENIE_TOKEN_FILE: {path}: {error}") from None


def check_token(token: object, what: str) -> str:
    """The token, or a ValueError that says what a token must be, but not what this one is."""
    if type(token) is not str:
        raise ValueError(f"{what} must be a string of {MIN_TOKEN} to {MAX_TOKEN} characters")
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise ValueError(f"{what} must have {MIN_TOKEN} to {MAX_TOKEN} characters, and has {len(token)}")
    if _CONTROL.search(token):
        raise ValueError(f"{what} must not contain control characters")
    return token


def _entries(text: str, certificates: bool) -> list[Entry]:
    words = text.split()
    if not words:
        raise ValueError("it is empty; it must hold one token, or TOML with a section for each name")
    if len(words) == 1 and not words[0].startswith(("[", "token=")) and '"' not in words[0]:
        return [Entry(EVERYTHING, check_token(words[0], "the token"))]
    try:
        sections = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = _WHERE.search(str(error))
        raise ValueError(f"it is neither one token nor TOML{where[0] if where else ''}") from None
    entries = [_entry(name, section, certificates) for name, section in sections.items()]
    if not entries:
        raise ValueError("it names nobody; it must have a section for each name, like [payments]")
    owners: dict[str, str] = {}
    for entry in entries:
        if entry.token is not None:
            other = owners.setdefault(entry.token, entry.principal.name)
            if other != entry.principal.name:
                raise ValueError(f"[{entry.principal.name}] has the same token as [{other}]; each must have its own")
    return entries


def _entry(name: str, section: Any, certificates: bool) -> Entry:
    if not 0 < len(name) <= MAX_NAME or _CONTROL.search(name):
        raise ValueError(f"the name of a section must have 1 to {MAX_NAME} characters, none of them control characters")
    if type(section) is not dict:
        raise ValueError(f"{_told(name)} stands outside of a section; there must be one for each name, like [payments]")
    for key in section:
        if key not in KEYS:
            raise ValueError(f"[{name}] {_told(key)} is not known; a section has {', '.join(KEYS)}")
    token = section.get("token")
    if token is not None:
        check_token(token, f"[{name}] token")
    elif not certificates:
        raise ValueError(
            f"[{name}] token is missing; only the name in a client's certificate needs none, "
            "and clients show no certificates without GENIE_TLS_CA"
        )
    return Entry(Principal(name, _prefixes(name, section), _rights(name, section)), token)


def _told(key: str) -> str:
    """A key as an error names it: what is long enough may be a token that stands in a wrong place."""
    return key if len(key) < MIN_TOKEN else "a key"


def _prefixes(name: str, section: dict[str, Any]) -> tuple[str, ...] | None:
    prefixes = section.get("prefixes")
    if prefixes is None:
        return None
    if type(prefixes) is not list or not prefixes or not all(type(prefix) is str and prefix for prefix in prefixes):
        raise ValueError(f'[{name}] prefixes must be a list of strings like ["accounts/"]; leave it out for every name')
    if any(len(prefix) > MAX_PREFIX or _CONTROL.search(prefix) for prefix in prefixes):
        raise ValueError(f"[{name}] prefixes must have at most {MAX_PREFIX} characters each, no control characters")
    return tuple(prefixes)


def _rights(name: str, section: dict[str, Any]) -> frozenset[str]:
    rights = section.get("may")
    if rights is None:
        return USUAL
    known = ", ".join(f'"{right}"' for right in RIGHTS)
    if type(rights) is not list or not rights or not all(type(right) is str for right in rights):
        raise ValueError(f"[{name}] may must be a list of some of {known}")
    for right in rights:
        if right not in RIGHTS:
            raise ValueError(f"[{name}] may has {right[:64]!r}, which is no right; there are {known}")
    return frozenset(rights)


# -- From what somebody shows to a name with its rights --------


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
