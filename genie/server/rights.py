"""What somebody with a name may ask for. Where clients need no name nothing of this is ever looked at."""

from __future__ import annotations

from genie.access import ADMIN, INSPECT, LOCK, Principal
from genie.core import Extend, Release, Request, Take
from genie.core.table import Table
from genie.errors import Code, RequestRejected
from genie.protocol.commands import Inspect, ReleaseByRef, Watch, WireCommand, Within


def refused(principal: Principal, command: WireCommand, table: Table) -> RequestRejected | None:
    """Why a command is not for this name, if so. What is asked for under it will belong to it."""
    if isinstance(command, Within):
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


def _others(principal: Principal, command: Release | ReleaseByRef | Extend, table: Table) -> RequestRejected | None:
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
