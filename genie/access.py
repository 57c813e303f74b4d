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
"""A name is compared with each of this number of prefixes. Among more prefixes, a binary search finds the one that can
match."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated client, with the resources that it may lock and its permissions."""

    name: str
    prefixes: tuple[str, ...] | None = None
    """The client may lock resources whose names begin with one of these texts. None if it may lock any resource."""
    permissions: frozenset[str] = DEFAULT_PERMISSIONS
    _sorted_prefixes: list[str] = field(init=False, repr=False, compare=False)
    """The prefixes in ascending order, for a binary search. A prefix that begins with another prefix is omitted. Empty
    if there are at most `MAX_LINEAR_PREFIXES`."""

    def __post_init__(self) -> None:
        """Prepare the binary search among many prefixes."""
        sorted_prefixes: list[str] = []
        if self.prefixes is not None and len(self.prefixes) > MAX_LINEAR_PREFIXES:
            for prefix in sorted(self.prefixes):  # `a` comes right before all texts that begin with `a`
                if not sorted_prefixes or not prefix.startswith(sorted_prefixes[-1]):
                    sorted_prefixes.append(prefix)
        object.__setattr__(self, "_sorted_prefixes", sorted_prefixes)  # the dataclass is frozen

    def has_permission(self, permission: str) -> bool:
        """Return whether the principal has a permission. `admin` includes all permissions."""
        return permission in self.permissions or ADMIN in self.permissions

    def may_access(self, name: str) -> bool:
        """Return whether the principal may lock the resource `name`, or all names below it if it is a subtree."""
        # The prefix `accounts/*` is a prefix of the text `accounts/**`, but not of all names below this subtree.
        return self.first_forbidden((name[:-2] if is_subtree(name) else name,)) is None

    def first_forbidden(self, names: Iterable[str]) -> str | None:
        """Return the first of `names` that begins with no prefix of the principal, or None if there is no such name."""
        prefixes, sorted_prefixes = self.prefixes, self._sorted_prefixes
        if prefixes is None:
            return None
        for name in names:
            if sorted_prefixes:
                # Only the last prefix that is not after `name` can match: a prefix between a match and `name` would
                # begin with the match, and such prefixes are omitted.
                index = max(0, bisect_right(sorted_prefixes, name) - 1)
                is_allowed = name.startswith(sorted_prefixes[index])
            else:
                is_allowed = name.startswith(prefixes)
            if not is_allowed:
                return name
        return None

    @property
    def sees_all(self) -> bool:
        """True if the principal may see all resources, with any name: `admin` may."""
        return self.prefixes is None or ADMIN in self.permissions

    def may_see(self, name: str) -> bool:
        """Return whether the principal may see the resource `name`, or at least one name below it if it is a subtree."""
        prefixes, sorted_prefixes = self.prefixes, self._sorted_prefixes
        if prefixes is None or self.sees_all or self.may_access(name):
            return True
        if not is_subtree(name):
            return False
        beginning = name[:-2]  # of all names below the subtree
        if not sorted_prefixes:
            return any(prefix.startswith(beginning) for prefix in prefixes)
        index = bisect_left(sorted_prefixes, beginning)  # of the first prefix that can begin like the subtree
        return index < len(sorted_prefixes) and sorted_prefixes[index].startswith(beginning)

    def may_see_context(self, resource: str) -> bool:
        """Return whether the principal may see the notes and traces of requests for `resource`.

        Those for a subtree belong to names of others, too, unless the principal may access all names below it.
        """
        return self.sees_all or self.may_access(resource)

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
NO_ACCESS = Principal("", prefixes=(), permissions=frozenset())
"""A principal that may see nothing."""

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
    """None if only a certificate authenticates the principal."""


Parts = Generator[None, None, T]
"""Work in parts, with a result of type T. Between two parts, the caller can do other work."""


def _do_all_parts(parts: Parts[T]) -> T:
    """Do all parts of some work without a pause, and return its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return cast("T", end.value)


def _read_token_file(path: str) -> tuple[str, bool]:
    """Return the text of a token file, and whether every user of this machine can read the file.

    Raises ValueError, with the path in the message, if the file cannot be read or is too long.
    """
    try:
        data, mode = read_regular_file(path, MAX_FILE_BYTES + 1)  # the additional byte shows that the file is too long
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
        if credential.token is not None:
            first_name = name_by_token.setdefault(credential.token, name)
            if first_name != name:
                raise ValueError(f"[{name}] has the same token as [{first_name}]; each must have its own")
        if len(credentials) % SECTIONS_PER_PART == 0:
            yield
    if not credentials:
        raise ValueError("the file has no principals; it must have a section for each, like [payments]")
    return credentials


def _parse_sections(text: str) -> Parts[dict[str, Any]]:
    """Parse a TOML text with sections, `SECTIONS_PER_PART` in a part. Raises TOMLDecodeError or RecursionError.

    The text is cut before lines that look like the start of a section. Such a line may also be in a string or a list,
    or may continue an earlier section. Then a piece is not valid by itself, and the whole text is parsed at once.
    """
    section_starts = [match.start() for match in _SECTION.finditer(text)]
    cuts = [0, *section_starts[SECTIONS_PER_PART::SECTIONS_PER_PART], len(text)]
    sections: dict[str, Any] = {}
    for start, end in pairwise(cuts):
        try:
            piece = tomllib.loads(text[start:end])
        except (tomllib.TOMLDecodeError, RecursionError):
            return tomllib.loads(text)
        if not sections.keys().isdisjoint(piece):
            return tomllib.loads(text)
        sections |= piece
        yield
    return sections


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
    """Return the text for a key in an error message. A long key may be a token, which must stay secret."""
    return key if len(key) < MIN_TOKEN_LENGTH else "a key"


def _parse_prefixes(name: str, section: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the resource prefixes in the section of the principal `name`, or None if it may lock all resources."""
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
    """Return the permissions in the section of the principal `name`: the value of the key `may`, or the default."""
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

    With `certificates_required`, clients must present a certificate.
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
        """Add a credential. Called only while the object is created."""
        principal = credential.principal
        self._principal_by_name[principal.name] = principal
        if credential.token is not None:
            self._token_digests.append((_digest(credential.token), principal))
            self._names_with_token.add(principal.name)

    @classmethod
    def load(cls, token: str | None, token_file: str | None, *, certificates_required: bool = False) -> AccessControl:
        """Create the access control from the server's settings: one token for all clients, or the path of a token file.

        If neither is given, clients need no token. Raises ValueError if both are given, or if the token or the token
        file is invalid. The message names the file and the section.
        """
        return _do_all_parts(cls.load_in_parts(token, token_file, certificates_required=certificates_required))

    @classmethod
    def load_in_parts(
        cls, token: str | None, token_file: str | None, *, certificates_required: bool = False
    ) -> Parts[AccessControl]:
        """Do the work of `load` in parts of a few ms each, because a token file may have thousands of principals."""
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

        Compares all digests, each in constant time, even after a match. So the duration says nothing about the tokens.
        """
        presented_digest = _digest(token)
        match = None
        for digest, principal in self._token_digests:
            if hmac.compare_digest(digest, presented_digest):
                match = principal
        return match

    def by_certificate(self, name: str) -> Principal | None:
        """Return the principal that a verified certificate names, or None if this principal has a token.

        `name` is the result of `genie.tls.certificate_name`. A principal with a token authenticates only by the token.
        A principal without a section in the token file gets the default permissions.
        """
        if name in self._names_with_token:
            return None
        return self._principal_by_name.get(name) or Principal(name)

    def by_name(self, name: str) -> Principal | None:
        """Return the principal `name` with its current prefixes and permissions, or None if it has no token.

        For a client that a token of this principal has authenticated before the token file was reloaded.
        """
        return self._principal_by_name[name] if name in self._names_with_token else None


def _digest(token: str) -> bytes:
    """Return the SHA-256 digest of a token. Digests have equal lengths, so that comparing them takes constant time."""
    return sha256(token.encode(errors="surrogatepass")).digest()  # UTF-8 has no lone surrogates
