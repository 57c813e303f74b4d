"""The access-control list: principals, their permissions, and the tokens and certificates that prove them."""

from __future__ import annotations

import hmac
import re
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from stat import S_IROTH
from typing import Any, Final, TypeVar, cast

from genie.files import read_regular_file
from genie.lock_modes import is_subtree

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
"""Number of prefixes that an error message lists."""

MAX_LINEAR_PREFIXES = 16
"""Number of prefixes that are all compared with a name. Among more, the only one that can match is searched."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated client, which may lock resources whose names begin with one of `prefixes` (None: any name)."""

    name: str
    prefixes: tuple[str, ...] | None = None
    permissions: frozenset[str] = DEFAULT_PERMISSIONS
    _sorted: list[str] = field(init=False, repr=False, compare=False)
    """The prefixes in order, if there are many; else empty. A prefix that begins with another prefix is omitted."""

    def __post_init__(self) -> None:
        """Sort the prefixes if there are many."""
        shortest: list[str] = []
        if self.prefixes is not None and len(self.prefixes) > MAX_LINEAR_PREFIXES:
            for prefix in sorted(self.prefixes):  # a prefix is before what it begins
                if not shortest or not prefix.startswith(shortest[-1]):
                    shortest.append(prefix)
        object.__setattr__(self, "_sorted", shortest)

    def has_permission(self, permission: str) -> bool:
        """Return whether the principal has a permission. `admin` includes all permissions."""
        return permission in self.permissions or ADMIN in self.permissions

    def may_access(self, name: str) -> bool:
        """Return whether the principal may lock the resource `name`, or all names below it if it is a subtree."""
        # The prefix `accounts/*` is a prefix of the text `accounts/**`, but not of all names below this subtree.
        return self.first_forbidden((name[:-2] if is_subtree(name) else name,)) is None

    def first_forbidden(self, names: Iterable[str]) -> str | None:
        """Return the first of these texts that does not begin with a prefix of the principal; None if all do."""
        prefixes, shortest = self.prefixes, self._sorted
        if prefixes is None:
            return None
        if not shortest:
            for name in names:
                if not name.startswith(prefixes):
                    return name
            return None
        for name in names:
            # If a prefix of `name` is in the list, it is the last entry that is not after `name`: any entry between them would
            # begin with this prefix, and such entries are omitted.
            if not name.startswith(shortest[max(0, bisect_right(shortest, name) - 1)]):
                return name
        return None

    @property
    def sees_all(self) -> bool:
        """True if the principal may see all resources, with any name: `admin` may."""
        return self.prefixes is None or ADMIN in self.permissions

    def may_see(self, name: str) -> bool:
        """Return whether the principal may see the resource `name`, or if it is a subtree, any name below it."""
        if self.sees_all or self.may_access(name):
            return True
        if self.prefixes is None or not is_subtree(name):
            return False
        if not self._sorted:
            return any(prefix.startswith(name[:-2]) for prefix in self.prefixes)
        index = bisect_left(self._sorted, name[:-2])  # the first prefix that may begin with it
        return index < len(self._sorted) and self._sorted[index].startswith(name[:-2])

    def may_see_all(self, prefix: str) -> bool:
        """Return whether the principal may see all resources whose names begin with `prefix`."""
        return self.sees_all or self.first_forbidden((prefix,)) is None

    @property
    def scope_description(self) -> str:
        """The resource names that the principal may lock, as text for error messages. Long lists are abbreviated."""
        if self.prefixes is None:
            return "any name"
        shown = ", ".join(repr(prefix) for prefix in self.prefixes[:MAX_SHOWN_PREFIXES])
        hidden_count = len(self.prefixes) - MAX_SHOWN_PREFIXES
        return f"names that begin with {shown}" + (f" or {hidden_count} more" if hidden_count > 0 else "")


T = TypeVar("T")


# -- The token file: one token, or TOML with a section for each principal ------------------------------

DEFAULT_NAME = "default"
"""Name of the principal if all clients have the same token."""
FULL_ACCESS = Principal(DEFAULT_NAME, permissions=frozenset(PERMISSIONS))

MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 1024
"""Characters in a token."""
MAX_NAME_LENGTH = 128
"""Characters in the name of a principal."""
MAX_PREFIX_LENGTH = 512
"""Characters in a prefix. Resource names have the same limit."""
MAX_FILE_BYTES = 1 << 20
"""Size limit of a token file."""

SECTION_KEYS = ("token", "prefixes", "may")
"""Keys of a principal's section in the token file."""
SECTIONS_PER_PART = 100
"""Sections of a token file that are parsed in one part: a few ms."""
_SECTION = re.compile(r"^(?=[ \t]*\[)", re.MULTILINE)
_TOML_ERROR_POSITION = re.compile(r" \(at .*\)$")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Credential:
    """A principal and its token."""

    principal: Principal
    token: str | None
    """None: only a certificate authenticates the principal."""


Parts = Generator[None, None, T]
"""Work in parts: the caller may do other work, such as that of an event loop, between two of them."""


def _read_token_file(path: str) -> tuple[str, bool]:
    """Return the text of a token file, and whether every user of this machine can read the file.

    Raises ValueError if the file cannot be read or is too long; the message names the file.
    """
    try:
        data, mode = read_regular_file(path, MAX_FILE_BYTES + 1)  # one byte more shows that the file is too long
        text = data.decode("utf-8-sig")  # accepts a byte order mark
    except OSError as error:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} must be text in UTF-8") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} must have at most {MAX_FILE_BYTES} bytes")
    return text, bool(mode & S_IROTH)


def check_token(token: object, source: str) -> str:
    """Return a token if it is valid, else raise ValueError.

    The error message begins with `source`, such as a variable name, and never contains the token.
    """
    if type(token) is not str:
        raise ValueError(f"{source} must be a string of {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH} characters")
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH:
        raise ValueError(
            f"{source} must have {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH} characters, and has {len(token)}"
        )
    if _CONTROL_CHARACTERS.search(token):
        raise ValueError(f"{source} must not contain control characters")
    return token


def _parse_credentials(text: str, *, certificates_required: bool) -> Parts[list[Credential]]:
    """Parse a token file: a single token for all clients, or TOML with a section for each principal.

    Raises ValueError if the text is neither.
    """
    words = text.split(maxsplit=1)
    if not words:
        raise ValueError("the file is empty; it must contain one token, or TOML with a section for each principal")
    is_single_token = len(words) == 1 and not words[0].startswith(("[", "token=")) and '"' not in words[0]
    if is_single_token:  # else TOML, which may also be a single word
        return [Credential(FULL_ACCESS, check_token(words[0], "the token"))]
    try:
        sections = yield from _parse_sections(text)
    except tomllib.TOMLDecodeError as error:
        position = _TOML_ERROR_POSITION.search(str(error))  # the rest of the message may quote a token
        raise ValueError(f"the file is neither one token nor TOML{position[0] if position else ''}") from None
    except RecursionError:
        raise ValueError("the file is neither one token nor TOML: its values are nested too deeply") from None
    credentials: list[Credential] = []
    name_by_token: dict[str, str] = {}
    for name, section in sections.items():
        credential = _parse_credential(name, section, certificates_required=certificates_required)
        credentials.append(credential)
        if credential.token is not None and (other := name_by_token.setdefault(credential.token, name)) != name:
            raise ValueError(f"[{name}] has the same token as [{other}]; each must have its own")
        if len(credentials) % SECTIONS_PER_PART == 0:
            yield
    if not credentials:
        raise ValueError("the file has no principals; it must have a section for each, like [payments]")
    return credentials


def _parse_sections(text: str) -> Parts[dict[str, Any]]:
    """Parse a TOML text with sections, `SECTIONS_PER_PART` in a part. Raises TOMLDecodeError or RecursionError if it is invalid.

    A line that begins like a section may be in a string or in a list. Then the text before it is not TOML, and no section of it
    is used: all is parsed in one part, as if the text is invalid, or if a section continues an earlier one.
    """
    bounds = [0, *[match.start() for match in _SECTION.finditer(text)][SECTIONS_PER_PART::SECTIONS_PER_PART], len(text)]
    sections: dict[str, Any] = {}
    for start, end in pairwise(bounds):
        try:
            part = tomllib.loads(text[start:end])
        except (tomllib.TOMLDecodeError, RecursionError):
            break
        if not sections.keys().isdisjoint(part):
            break
        sections |= part
        yield
    else:
        return sections
    return tomllib.loads(text)


def _parse_credential(name: str, section: Any, *, certificates_required: bool) -> Credential:
    """Parse the section of the principal `name` in a token file. Raises ValueError if it is invalid.

    Without `certificates_required` the section must contain a token.
    """
    if not 0 < len(name) <= MAX_NAME_LENGTH or _CONTROL_CHARACTERS.search(name):
        raise ValueError(f"the name of a section must have 1 to {MAX_NAME_LENGTH} characters and no control characters")
    if type(section) is not dict:
        raise ValueError(f"{_redacted(name)} is outside of a section; each principal needs one, like [payments]")
    for key in section:
        if key not in SECTION_KEYS:
            raise ValueError(f"[{name}] {_redacted(key)} is not known; a section has {', '.join(SECTION_KEYS)}")
    token = section.get("token")
    if token is not None:
        check_token(token, f"[{name}] token")
    elif not certificates_required:
        raise ValueError(
            f"[{name}] token is missing; it is optional only if clients present certificates, "
            "which requires GENIE_TLS_CA"
        )
    return Credential(Principal(name, _parse_prefixes(name, section), _parse_permissions(name, section)), token)


def _redacted(key: str) -> str:
    """Return the text for a key in an error message: "a key" if its length is that of a token, which must stay secret."""
    return key if len(key) < MIN_TOKEN_LENGTH else "a key"


def _parse_prefixes(name: str, section: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the resource prefixes in the section of the principal `name`. None: all resources are allowed."""
    prefixes = section.get("prefixes")
    if prefixes is None:
        return None
    if type(prefixes) is not list or not prefixes or not all(type(prefix) is str and prefix for prefix in prefixes):
        raise ValueError(
            f'[{name}] prefixes must be a list of strings like ["accounts/"]; omit it to allow every resource'
        )
    if any(len(prefix) > MAX_PREFIX_LENGTH or _CONTROL_CHARACTERS.search(prefix) for prefix in prefixes):
        raise ValueError(
            f"[{name}] prefixes must have at most {MAX_PREFIX_LENGTH} characters each, and no control characters"
        )
    return tuple(prefixes)


def _parse_permissions(name: str, section: dict[str, Any]) -> frozenset[str]:
    """Return the permissions in the section of the principal `name`: the value of the key `may`, else the default."""
    permissions = section.get("may")
    if permissions is None:
        return DEFAULT_PERMISSIONS
    allowed = ", ".join(f'"{permission}"' for permission in PERMISSIONS)
    if (
        type(permissions) is not list
        or not permissions
        or not all(type(permission) is str for permission in permissions)
    ):
        raise ValueError(f"[{name}] 'may' must be a non-empty list of permissions: {allowed}")
    for permission in permissions:
        if permission not in PERMISSIONS:
            raise ValueError(f"[{name}] 'may' contains {permission[:64]!r}, which is not a permission: use {allowed}")
    return frozenset(permissions)


# -- Authentication: from a token or a certificate to a principal -------------------------------------


class AccessControl:
    """Finds the principal of a token or a certificate. Immutable: a reload of the token file makes a new object.

    `certificates_required`: clients must present a certificate. `file_world_readable`: every user of this machine can
    read the token file.
    """

    def __init__(
        self,
        credentials: Iterable[Credential] = (),
        *,
        certificates_required: bool = False,
        file_world_readable: bool = False,
    ) -> None:
        self._token_digests: list[tuple[bytes, Principal]] = []
        """The digest of each token, with the principal of the token."""
        self._principal_by_name: dict[str, Principal] = {}
        """All configured principals, with and without a token."""
        self._names_with_token: set[str] = set()
        """Names of the principals that have a token."""
        self._certificates_required = certificates_required
        self.file_world_readable = file_world_readable
        """True if every user of this machine can read the token file."""
        for credential in credentials:
            self._add(credential)

    def _add(self, credential: Credential) -> None:
        """Add a credential. Only during the creation."""
        principal = credential.principal
        self._principal_by_name[principal.name] = principal
        if credential.token is not None:
            self._token_digests.append((_digest(credential.token), principal))
            self._names_with_token.add(principal.name)

    @classmethod
    def load(cls, token: str | None, token_file: str | None, *, certificates_required: bool = False) -> AccessControl:
        """Create the access control from the server's settings: one token for all clients, or the path of a token file.

        If neither is given, clients need no token. Raises ValueError if both are given, or if the token or the token file
        is invalid; the message names the file and the section.
        """
        parts = cls.load_in_parts(token, token_file, certificates_required=certificates_required)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return cast("AccessControl", end.value)

    @classmethod
    def load_in_parts(
        cls, token: str | None, token_file: str | None, *, certificates_required: bool = False
    ) -> Parts[AccessControl]:
        """Load the access tokens as `load` does, but in parts of a few ms each: a file may have thousands of principals."""
        if token is not None and token_file is not None:
            raise ValueError("GENIE_TOKEN and GENIE_TOKEN_FILE are mutually exclusive: set only one")
        credentials: list[Credential] = []
        world_readable = False
        if token is not None:
            credentials = [Credential(FULL_ACCESS, check_token(token, "GENIE_TOKEN"))]
        elif token_file is not None:
            text, world_readable = _read_token_file(token_file)
            try:
                credentials = yield from _parse_credentials(text, certificates_required=certificates_required)
            except ValueError as error:
                raise ValueError(f"GENIE_TOKEN_FILE: {token_file}: {error}") from None
        access = cls(certificates_required=certificates_required, file_world_readable=world_readable)
        for number, credential in enumerate(credentials, 1):
            access._add(credential)
            if number % SECTIONS_PER_PART == 0:
                yield
        return access

    @property
    def has_tokens(self) -> bool:
        """True if any principal has a token."""
        return bool(self._token_digests)

    @property
    def allows_anonymous(self) -> bool:
        """True if clients need neither a token nor a certificate."""
        return not self._token_digests and not self._certificates_required

    def by_token(self, token: str) -> Principal | None:
        """Return the principal of a token, or None if the token is unknown.

        Prevents timing attacks: compares all digests, each in constant time, even after a match.
        """
        presented_digest = _digest(token)
        match = None
        for digest, principal in self._token_digests:
            if hmac.compare_digest(digest, presented_digest):
                match = principal
        return match

    def by_certificate(self, name: str) -> Principal | None:
        """Return the principal that a verified certificate names, or None if this principal has a token.

        `name` is the result of `genie.tls.certificate_name`. A principal with a token authenticates only by the token. A
        principal without a section in the token file gets the default permissions.
        """
        if name in self._names_with_token:
            return None
        return self._principal_by_name.get(name) or Principal(name)

    def by_name(self, name: str) -> Principal | None:
        """Return the current principal of a client that a token of the principal `name` has authenticated before.

        Returns None if the token file was reloaded since, and has no token for this principal anymore.
        """
        return self._principal_by_name[name] if name in self._names_with_token else None


def _digest(token: str) -> bytes:
    """Return the SHA-256 digest of a token; digests have equal lengths, so comparing them takes constant time."""
    return sha256(token.encode(errors="surrogatepass")).digest()  # UTF-8 has no lone surrogates
