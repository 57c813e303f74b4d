"""Who may come in at present, and what a stranger is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import structlog

from genie.access import ADMIN, INSPECT, LOCK, Access, Principal
from genie.core import Extend, Release, Request, Take
from genie.core.lock_table import LockTable
from genie.errors import Code, RequestRejected
from genie.protocol.commands import Inspect, Namespaced, ReleaseByRef, Watch, WireCommand
from genie.protocol.diagnostics import hello_token, is_hello

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.observability.stats import Stats

log = structlog.get_logger()

MAX_HELLO_BYTES = 4096
"""Bytes that a stranger may say in a line."""

HELLO_TIMEOUT_S = 10.0
"""How long a stranger may take to say `hello`."""


class Denial(NamedTuple):
    """Why a connection was not authenticated: `reason` for the log, `error` for the client."""

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
    "no token", RequestRejected(Code.UNAUTHORIZED, "hello carried no token, and this server requires one: a string")
)
UNKNOWN_TOKEN = Denial("unknown token", RequestRejected(Code.UNAUTHORIZED, "the token of hello is not known"))
"""The same for every token that is not known: the answer to a guess does not depend on the guess."""

ACCESS_REVOKED = RequestRejected(Code.UNAUTHORIZED, "this name, or what it was doing, is not allowed any more")


class Authenticator:
    """What the connections of a server ask; `access` is another one when the file of tokens was read again."""

    def __init__(self, settings: Settings, stats: Stats) -> None:
        self._settings = settings
        self._stats = stats
        self.access = self._read()

    def _read(self) -> Access:
        settings = self._settings
        access = Access.read(settings.token, settings.token_file, certificates=settings.tls.ca is not None)
        if access.seen_by_all:
            log.warning("everybody on this machine can read the token file; chmod o-r it", file=settings.token_file)
        return access

    def reread(self) -> bool:
        """Read the file again. Where it is wrong the old one goes on to count, and the log says why."""
        try:
            self.access = self._read()
        except ValueError as error:
            log.error("the token file was not taken over; the old one still counts", why=str(error))  # noqa: TRY400
            return False
        return True

    def authenticate(self, line: bytes, known: Principal | None) -> Principal | None:
        """Who says this first line: whoever has the token in it, else who was known by a certificate.

        None: a stranger, or somebody with a wrong token.
        """
        token = hello_token(line)
        return known if token is None else self.access.by_token(token)

    def denial(self, line: bytes) -> Denial:
        """Return why this first line, of a permitted length, did not authenticate its connection."""
        if not is_hello(line):
            return NO_HELLO
        return NO_TOKEN if hello_token(line) is None else UNKNOWN_TOKEN

    def reauthenticate(self, principal: Principal, certificate: str | None) -> Principal | None:
        """Who has come in before, as the file says now; None: it does not know them any more."""
        return self.access.by_name(principal.name) if certificate is None else self.access.by_certificate(certificate)

    def start_auth_timer(self, late: Callable[[], None]) -> asyncio.TimerHandle:
        """Call this when a stranger has had time enough to say who it is."""
        return asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, late)

    def refused(self, why: RequestRejected) -> None:
        """Somebody was sent away before a handler heard of it."""
        self._stats.errors[why.code] += 1


# -- What somebody with a name may ask for. Where clients need no name nothing of this is ever looked at --------


def refused(principal: Principal, command: WireCommand, table: LockTable) -> RequestRejected | None:
    """Why a command is not for this name, if so. What is asked for under it will belong to it."""
    if isinstance(command, Namespaced):
        command = command.command
    if isinstance(command, Request):
        return _request(principal, command, command.names())
    if isinstance(command, Take):
        return _request(principal, command.request, [name for name, _ in command.choices])
    if isinstance(command, Release | ReleaseByRef | Extend):
        return _others(principal, command, table)
    if isinstance(command, Inspect):
        return _look(principal, "inspect: resource", command.resource, command.ref)
    if isinstance(command, Watch):
        return _look(principal, "watch: prefix", command.prefix, command.ref)
    return None


def _request(principal: Principal, request: Request, names: tuple[str, ...] | list[str]) -> RequestRejected | None:
    request.principal = principal.name
    if not principal.may(LOCK):
        return _unauthorized(_lacking(principal, LOCK), ref=request.ref)
    for name in names:
        if not principal.covers(name):
            return _unauthorized(
                f"{name!r} is not for {principal.name}, which may lock {principal.reach}", ref=request.ref
            )
    return None


def _others(principal: Principal, command: Release | ReleaseByRef | Extend, table: LockTable) -> RequestRejected | None:
    """A living request belongs to the name that made it. A `ref` is known only to the session that used it."""
    id_ = None if isinstance(command, ReleaseByRef) else command.id
    if not principal.may(LOCK):
        return _unauthorized(_lacking(principal, LOCK), ref=command.ref, id=id_)
    request = None if id_ is None else table.find(id_)
    if request is None or request.principal == principal.name or principal.may(ADMIN):
        return None
    why = f"request {id_} was not made by {principal.name}, which may not {ADMIN}"
    return _unauthorized(why, ref=command.ref, id=id_)


def _look(principal: Principal, field: str, begins: str | None, ref: str | None) -> RequestRejected | None:
    if not principal.may(INSPECT):
        return _unauthorized(_lacking(principal, INSPECT), ref=ref)
    if sees(principal, begins):
        return None
    return _unauthorized(f"{field} must be given, and {principal.name} may look at {principal.reach}", ref=ref)


def sees(principal: Principal, begins: str | None) -> bool:
    """Whether somebody may look at all that begins so; None: at everything."""
    bounds = principal.bounds
    return bounds is None or (begins is not None and begins.startswith(bounds))


def _lacking(principal: Principal, right: str) -> str:
    may = ", ".join(sorted(principal.rights)) or "do nothing any more"
    return f"this needs the right to {right}; {principal.name} may {may}"


def _unauthorized(why: str, *, ref: str | None = None, id: int | None = None) -> RequestRejected:
    return RequestRejected(Code.UNAUTHORIZED, why, ref=ref, id=id)
