"""The access-control list: principals, their permissions, and the tokens and certificates that prove them."""

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
"""`inspect`, `watch`, and the admin port."""
ADMIN: Final = "admin"
"""Everything, including the release of other principals' requests."""
PERMISSIONS: Final = (LOCK, INSPECT, ADMIN)

DEFAULT_PERMISSIONS: Final = frozenset((LOCK, INSPECT))
"""Permissions of a principal for which none are configured."""

MAX_SHOWN_PREFIXES = 10
"""Prefixes that an error lists."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated client. It may lock resources whose names begin with one of `prefixes`; None: all."""

    name: str
    prefixes: tuple[str, ...] | None = None
    permissions: frozenset[str] = DEFAULT_PERMISSIONS

    def has_permission(self, permission: str) -> bool:
        """Return whether it has a permission; `admin` includes all."""
        return permission in self.permissions or ADMIN in self.permissions

    def may_access(self, name: str) -> bool:
        """Return whether it may lock a resource of this name."""
        return self.prefixes is None or name.startswith(self.prefixes)

    @property
    def visible_prefixes(self) -> tuple[str, ...] | None:
        """Prefixes of the names that it may see; None: all, as with `admin`."""
        return None if ADMIN in self.permissions else self.prefixes

    @property
    def scope_description(self) -> str:
        """Its prefixes, for error messages."""
        if self.prefixes is None:
            return "any name"
        shown = ", ".join(repr(prefix) for prefix in self.prefixes[:MAX_SHOWN_PREFIXES])
        more = len(self.prefixes) - MAX_SHOWN_PREFIXES
        return f"names that begin with {shown}" + (f" or {more} more" if more > 0 else "")


# -- The token file: one token, or TOML with a section for each principal ------------------------------

DEFAULT_NAME = "default"
"""Name of the principal where there is one token for all clients."""
FULL_ACCESS = Principal(DEFAULT_NAME, permissions=frozenset(PERMISSIONS))

MIN_TOKEN = 16
MAX_TOKEN = 1024
"""Characters in a token."""
MAX_NAME = 128
"""Characters in the name of a section."""
MAX_PREFIX = 512
"""Characters in a prefix: as many as the name of a resource may have."""
MAX_FILE_BYTES = 1 << 20
"""Bytes of the file."""

KEYS = ("token", "prefixes", "may")
_WHERE = re.compile(r" \(at .*\)$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Credential:
    """A principal and its token; None: only a certificate proves it."""

    principal: Principal
    token: str | None


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The content of a token file. `world_readable`: every user of this machine can read it."""

    credentials: tuple[Credential, ...]
    world_readable: bool


def load_token_file(path: str, certificates: bool) -> TokenFile:
    """Read and check a token file. `certificates`: clients present certificates, so a principal needs no token.

    ValueError says what is wrong and what would be right.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
            world_readable = bool(Path(path).stat().st_mode & S_IROTH)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} must be text in UTF-8") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} must have at most {MAX_FILE_BYTES} bytes")
    try:
        return TokenFile(tuple(_credentials(text, certificates)), world_readable)
    except ValueError as error:
        raise ValueError(f"GENIE_TOKEN_FILE: {path}: {error}") from None


def check_token(token: object, what: str) -> str:
    """Return the token, or raise a ValueError that says what a token must be, but does not quote this one."""
    if type(token) is not str:
        raise ValueError(f"{what} must be a string of {MIN_TOKEN} to {MAX_TOKEN} characters")
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise ValueError(f"{what} must have {MIN_TOKEN} to {MAX_TOKEN} characters, and has {len(token)}")
    if _CONTROL.search(token):
        raise ValueError(f"{what} must not contain control characters")
    return token


def _credentials(text: str, certificates: bool) -> list[Credential]:
    words = text.split()
    if not words:
        raise ValueError("it is empty; it must hold one token, or TOML with a section for each name")
    if len(words) == 1 and not words[0].startswith(("[", "token=")) and '"' not in words[0]:
        return [Credential(FULL_ACCESS, check_token(words[0], "the token"))]
    try:
        sections = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = _WHERE.search(str(error))
        raise ValueError(f"it is neither one token nor TOML{where[0] if where else ''}") from None
    credentials = [_credential(name, section, certificates) for name, section in sections.items()]
    if not credentials:
        raise ValueError("it names nobody; it must have a section for each name, like [payments]")
    owners: dict[str, str] = {}
    for credential in credentials:
        if credential.token is not None:
            other = owners.setdefault(credential.token, credential.principal.name)
            if other != credential.principal.name:
                raise ValueError(
                    f"[{credential.principal.name}] has the same token as [{other}]; each must have its own"
                )
    return credentials


def _credential(name: str, section: Any, certificates: bool) -> Credential:
    if not 0 < len(name) <= MAX_NAME or _CONTROL.search(name):
        raise ValueError(f"the name of a section must have 1 to {MAX_NAME} characters, none of them control characters")
    if type(section) is not dict:
        raise ValueError(
            f"{_redacted(name)} stands outside of a section; there must be one for each name, like [payments]"
        )
    for key in section:
        if key not in KEYS:
            raise ValueError(f"[{name}] {_redacted(key)} is not known; a section has {', '.join(KEYS)}")
    token = section.get("token")
    if token is not None:
        check_token(token, f"[{name}] token")
    elif not certificates:
        raise ValueError(
            f"[{name}] token is missing; only the name in a client's certificate needs none, "
            "and clients show no certificates without GENIE_TLS_CA"
        )
    return Credential(Principal(name, _prefixes(name, section), _permissions(name, section)), token)


def _redacted(key: str) -> str:
    """Return a key as an error may quote it: a long one may be a misplaced token."""
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


def _permissions(name: str, section: dict[str, Any]) -> frozenset[str]:
    permissions = section.get("may")
    if permissions is None:
        return DEFAULT_PERMISSIONS
    known = ", ".join(f'"{permission}"' for permission in PERMISSIONS)
    if (
        type(permissions) is not list
        or not permissions
        or not all(type(permission) is str for permission in permissions)
    ):
        raise ValueError(f"[{name}] may must be a list of some of {known}")
    for permission in permissions:
        if permission not in PERMISSIONS:
            raise ValueError(f"[{name}] may has {permission[:64]!r}, which is no right; there are {known}")
    return frozenset(permissions)


# -- From a token or a certificate to a principal -----------------------------------------------------


class AccessControl:
    """The principals, by token and by certificate. Immutable: a reload of the token file makes another.

    `certificates`: clients must present a certificate. `world_readable`: every user of this machine can read the file.
    """

    def __init__(
        self, credentials: Iterable[Credential] = (), *, certificates: bool = False, world_readable: bool = False
    ) -> None:
        credentials = tuple(credentials)
        self._by_digest = [
            (_digest(credential.token), credential.principal)
            for credential in credentials
            if credential.token is not None
        ]
        self._by_name = {credential.principal.name: credential.principal for credential in credentials}
        self._with_token = {principal.name for _, principal in self._by_digest}
        self._certificates = certificates
        self.world_readable = world_readable

    @classmethod
    def load(cls, token: str | None, token_file: str | None, *, certificates: bool = False) -> AccessControl:
        """Make the list that the settings configure. ValueError where they, or the token file, are wrong."""
        if token is not None and token_file is not None:
            raise ValueError("GENIE_TOKEN and GENIE_TOKEN_FILE exclude each other: set one of them")
        if token is not None:
            return cls([Credential(FULL_ACCESS, check_token(token, "GENIE_TOKEN"))], certificates=certificates)
        if token_file is not None:
            found = load_token_file(token_file, certificates)
            return cls(found.credentials, certificates=certificates, world_readable=found.world_readable)
        return cls(certificates=certificates)

    @property
    def has_tokens(self) -> bool:
        """Whether a token authenticates anyone."""
        return bool(self._by_digest)

    @property
    def open(self) -> bool:
        """Whether clients need not authenticate."""
        return not self._by_digest and not self._certificates

    def by_token(self, token: str) -> Principal | None:
        """Return the principal of a token, or None.

        The time that it takes reveals nothing: all digests are compared, each in constant time.
        """
        digest_of_token, found = _digest(token), None
        for digest, principal in self._by_digest:
            if hmac.compare_digest(digest, digest_of_token):
                found = principal
        return found

    def by_certificate(self, name: str) -> Principal | None:
        """Return the principal of a certificate's name: as configured, else one that may lock and inspect everything.

        None where the name has a token: then only the token proves it.
        """
        return None if name in self._with_token else self._by_name.get(name) or Principal(name)

    def by_name(self, name: str) -> Principal | None:
        """Return the principal of a name that a token proved before, or None where it has no token any more."""
        return self._by_name[name] if name in self._with_token else None


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogatepass")).digest()
