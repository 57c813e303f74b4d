"""Authentication of connections, and authorization of their commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, cast

import structlog

from genie.access import ADMIN, INSPECT, LOCK, AccessControl, Principal
from genie.core import Extend, Release, Request, Take
from genie.core.lock_table import LockTable
from genie.errors import Code, RequestRejected
from genie.lock_modes import is_subtree
from genie.protocol.commands import (
    Inspect,
    LargeRequest,
    Namespaced,
    ReleaseByRef,
    Watch,
    WireCommand,
    without_namespace,
)
from genie.protocol.diagnostics import hello_token, is_hello

if TYPE_CHECKING:
    from genie.observability.stats import Stats

log = structlog.get_logger()

MAX_HELLO_BYTES = 4096
"""Maximum bytes of the first line of a client without a certificate."""

HELLO_TIMEOUT_S = 10.0
"""Seconds that a client has to authenticate itself."""

TLS_RECORD = b"\x16\x03"
"""First bytes of a TLS handshake, which contains no line end."""


class Denial(NamedTuple):
    """A failed authentication. The server logs `reason`, and sends `error` to the client."""

    reason: str
    error: RequestRejected


NO_HELLO = Denial(
    "no hello",
    RequestRejected(
        Code.UNAUTHORIZED,
        'the first line must be hello with a token of this server: {"command":"hello","payload":{"token":"…"}}',
    ),
)
NO_TOKEN = Denial(
    "no token",
    RequestRejected(
        Code.UNAUTHORIZED, "hello carried no token, and this server requires one in the field token, as a string"
    ),
)
UNKNOWN_TOKEN = Denial("unknown token", RequestRejected(Code.UNAUTHORIZED, "the token of hello is not known"))
"""The same error for all unknown tokens, so that the error reveals nothing about a guessed token."""

ACCESS_REVOKED = RequestRejected(
    Code.UNAUTHORIZED,
    "access revoked: the principal of this connection, or its permission for a watched prefix, was removed",
)


def revoked(principal: Principal) -> Principal:
    """Return the principal without its permissions, so that its connections are closed."""
    return Principal(principal.name, permissions=frozenset())


class Authenticator:
    """Authenticates connections by the access-control list `access`, which `reload` replaces.

    With `certificates_required`, clients must present a certificate. Raises ValueError if the token settings are invalid.
    """

    def __init__(self, token: str | None, token_file: str | None, *, certificates_required: bool, stats: Stats) -> None:
        self._certificates_required = certificates_required
        self._stats = stats
        self.access = AccessControl.load(token, token_file, certificates_required=certificates_required)
        """The current access-control list."""
        self._warn_if_world_readable(token_file)

    async def load(self, token: str | None, token_file: str | None) -> AccessControl:
        """Read the token file, a part in each iteration of the event loop. Raises ValueError if it is invalid."""
        parts = AccessControl.load_in_parts(token, token_file, certificates_required=self._certificates_required)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return cast("AccessControl", end.value)
            await asyncio.sleep(0)

    async def reload(self, token: str | None, token_file: str | None) -> None:
        """Read the token file again, and replace the access-control list. Logs a warning if the file is world-readable.

        Raises ValueError, and keeps the current list, if the file is invalid.
        """
        self.access = await self.load(token, token_file)
        self._warn_if_world_readable(token_file)

    def _warn_if_world_readable(self, token_file: str | None) -> None:
        if self.access.file_world_readable:
            log.warning(
                "token file is world-readable, every user of the machine can read the tokens",
                file=token_file,
                hint="chmod o-r",
            )

    def begin(self, certificate: str | None, max_line: int) -> tuple[Handshake | None, Principal | None]:
        """Start to authenticate a connection. `certificate` is the name in its verified certificate, or None.

        Return `(handshake, principal)`. The client's first line completes the handshake; None if no handshake is
        needed. The principal is that of the certificate, or None.
        """
        access = self.access
        principal = None if certificate is None else access.by_certificate(certificate)
        if access.has_tokens or (principal is None and not access.allows_anonymous):
            return Handshake(self, principal, max_line), principal
        return None, principal

    def authenticate(self, line: bytes, by_certificate: Principal | None) -> Principal | None:
        """Return the principal of a client with this first line, or None if the client is not authenticated.

        If the line is a `hello` with a token, only the token counts. Otherwise the principal is `by_certificate`, that
        of the client's certificate.
        """
        token = hello_token(line)
        return by_certificate if token is None else self.access.by_token(token)

    def authenticate_again(self, hello: bytes, certificate: str | None) -> Principal | None:
        """Return the principal for a `hello` that follows a rejected `hello`, or None if the client is not authenticated.

        The token of this `hello` counts, or without a token the client's certificate with this name.
        """
        return self.authenticate(hello, None if certificate is None else self.access.by_certificate(certificate))

    def reauthorize(self, principal: Principal, certificate: str | None) -> Principal:
        """Return a connected principal with its current permissions: none if its entry in the access-control list was removed."""
        access = self.access
        current = access.by_name(principal.name) if certificate is None else access.by_certificate(certificate)
        return current or revoked(principal)

    def denial(self, line: bytes) -> Denial:
        """Return the denial for a first line that did not authenticate its connection."""
        if not is_hello(line):
            return NO_HELLO
        return NO_TOKEN if hello_token(line) is None else UNKNOWN_TOKEN

    def count(self, error: RequestRejected) -> None:
        """Count an error that is sent before the connection has a command handler. The handler counts later errors."""
        self._stats.errors[error.code] += 1


class Handshake:
    """Authenticates one connection by its first line, which is limited in bytes and in time.

    `principal` is the principal of the client's certificate, if any. A token in `hello` takes precedence over it.
    """

    __slots__ = ("_authenticator", "_max_bytes", "_timer", "principal", "received")

    def __init__(self, authenticator: Authenticator, principal: Principal | None, max_line: int) -> None:
        self._authenticator = authenticator
        self.principal = principal
        self.received = bytearray()
        """Bytes received so far."""
        self._max_bytes = MAX_HELLO_BYTES if principal is None else max_line
        """Maximum bytes of the first line. A client with a certificate is already known, so it may send a long command."""
        self._timer: asyncio.TimerHandle | None = None

    def start_timer(self, on_timeout: Callable[[], None]) -> None:
        """Call `on_timeout` after `HELLO_TIMEOUT_S`, unless `stop_timer` is called earlier."""
        self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, on_timeout)

    def stop_timer(self) -> None:
        """Cancel the timeout of the handshake."""
        if self._timer is not None:
            self._timer.cancel()

    def receive(self, data: bytes) -> Principal | Denial | None:
        """Add received bytes. Return the principal or a denial, or None while the first line is incomplete.

        A TLS record, or a line that is too long, has no token: it is denied, unless the client has a certificate.
        """
        received = self.received
        searched_until = len(received)
        received += data if received else data.lstrip()  # blank lines before the first line are ignored
        end = received.find(b"\n", searched_until)
        is_complete = end >= 0
        line = received[:end] if is_complete else received
        length = len(line) - 1 if line.endswith(b"\r") else len(line)
        too_long = length > self._max_bytes
        if not is_complete and not too_long and not received.startswith(TLS_RECORD):
            return None
        if too_long or not is_complete:  # the line contains no valid `hello`, so only the certificate counts
            return self.principal or NO_HELLO
        principal = self._authenticator.authenticate(bytes(line), self.principal)
        return self._authenticator.denial(bytes(line)) if principal is None else principal


# -- Authorization: only if clients must authenticate --------------------------------------------------


_CHANGES = (Release, ReleaseByRef, Extend)  # a tuple: a union type in `isinstance` would be created at each call
_WRAPPERS = (Namespaced, LargeRequest)


def authorize(  # noqa: PLR0911 - one for each kind of command
    principal: Principal, command: WireCommand, table: LockTable
) -> RequestRejected | None:
    """Return an error if a principal may not execute a command, else None. Sets the principal of a new request."""
    if isinstance(command, Request):
        return _authorize_request(principal, command, command.names())
    if isinstance(command, _CHANGES):
        return _authorize_change(principal, command, table)
    if isinstance(command, _WRAPPERS):
        return authorize(principal, without_namespace(command), table)
    if isinstance(command, Take):
        return _authorize_request(principal, command.request, [name for name, _ in command.choices])
    if isinstance(command, Inspect):
        name = command.resource
        prefix = name[:-2] if name is not None and is_subtree(name) else name  # `a/` for the subtree `a/**`
        return _authorize_view(principal, "inspect: resource", prefix, command.ref)
    if isinstance(command, Watch):
        return _authorize_view(principal, "watch: prefix", command.prefix, command.ref)
    return None  # `ping`, `bye` and `unwatch` need no permission


def may_inspect(principal: Principal, prefix: str | None) -> bool:
    """Return whether a principal may see all resources whose names start with `prefix`. None stands for all names."""
    return principal.sees_all if prefix is None else principal.may_see_all(prefix)


def _authorize_request(principal: Principal, request: Request, names: Iterable[str]) -> RequestRejected | None:
    """Return an error if a principal may not lock all `names`, else None. Sets the principal of the request."""
    request.context = request.context.with_principal(principal.name)
    if not principal.has_permission(LOCK):
        return _unauthorized(_missing_permission(principal, LOCK), ref=request.ref)
    forbidden = principal.first_forbidden(names)
    if forbidden is None and request.details is not None:
        forbidden = next((name for name in request.details.subtrees if not principal.may_access(name)), None)
    if forbidden is None:
        return None
    reason = f"{principal.name} may not lock {forbidden!r}, only {principal.scope_description}"
    return _unauthorized(reason, ref=request.ref)


def _authorize_change(
    principal: Principal, command: Release | ReleaseByRef | Extend, table: LockTable
) -> RequestRejected | None:
    """Return an error if a principal may not release or extend a request, else None.

    A principal may change its own requests. For the requests of others it needs the permission `admin`. A release by
    `ref` needs no such check, because a `ref` only finds requests of the same session.
    """
    id_ = None if isinstance(command, ReleaseByRef) else command.id
    if not principal.has_permission(LOCK):
        return _unauthorized(_missing_permission(principal, LOCK), ref=command.ref, id=id_)
    request = None if id_ is None else table.find(id_)
    if request is None or request.context.principal == principal.name or principal.has_permission(ADMIN):
        return None
    reason = f"request {id_} belongs to another principal, and {principal.name} lacks the permission {ADMIN!r}"
    return _unauthorized(reason, ref=command.ref, id=id_)


def _authorize_view(principal: Principal, field: str, prefix: str | None, ref: str | None) -> RequestRejected | None:
    """Return an error if a principal may not see all names with `prefix`, else None. The error names `field`."""
    if not principal.has_permission(INSPECT):
        return _unauthorized(_missing_permission(principal, INSPECT), ref=ref)
    if may_inspect(principal, prefix):
        return None
    return _unauthorized(
        f"{field} must be within what {principal.name} may inspect: {principal.scope_description}", ref=ref
    )


def _missing_permission(principal: Principal, permission: str) -> str:
    """Return the error text for a principal without a permission, with the permissions that it has."""
    permissions = ", ".join(map(repr, sorted(principal.permissions))) or "none"
    return f"this requires the permission {permission!r}; {principal.name} has {permissions}"


def _unauthorized(reason: str, *, ref: str | None = None, id: int | None = None) -> RequestRejected:
    return RequestRejected(Code.UNAUTHORIZED, reason, ref=ref, id=id)
