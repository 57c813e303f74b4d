"""The file of tokens: one word, or TOML with a section for each name.

No error repeats a token: a file may be read by mistake, and what is logged is seen by many.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from stat import S_IROTH
from typing import Any

from genie.access.principal import RIGHTS, USUAL, Principal

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
