"""What somebody with a name may ask for. Where clients need no name nothing of this is ever looked at."""

from __future__ import annotations

from genie.access import ADMIN, INSPECT, LOCK, Principal
from genie.core import Extend, Release, Request, Take
from genie.core.table import Table
from genie.errors import Code, RequestRejected
from genie.protocol.commands import Inspect, Watch, WireCommand, Within


def refused(principal: Principal, command: WireCommand, table: Table) -> RequestRejected | None:
    """Why a command is not for this name, if so. What is asked for under it will belong to it."""
    if isinstance(command, Within):
        command = command.command
    if isinstance(command, Request):
        return _request(principal, command, command.names())
    if isinstance(command, Take):
        return _request(principal, command.request, [name for name, _ in command.choices])
    if isinstance(command, Release | Extend):
        return _others(principal, command.id, table)
    if isinstance(command, Inspect):
        return _look(principal, "inspect: resource", command.resource)
    if isinstance(command, Watch):
        return _look(principal, "watch: prefix", command.prefix)
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


def _others(principal: Principal, id: int, table: Table) -> RequestRejected | None:
    """A request that lives belongs to the name that made it; one that has ended, to nobody."""
    if not principal.may(LOCK):
        return _unauthorized(_lacking(principal, LOCK), id=id)
    request = table.find(id)
    if request is None or request.principal == principal.name or principal.may(ADMIN):
        return None
    return _unauthorized(f"request {id} was not made by {principal.name}, which may not {ADMIN}", id=id)


def _look(principal: Principal, field: str, begins: str | None) -> RequestRejected | None:
    if not principal.may(INSPECT):
        return _unauthorized(_lacking(principal, INSPECT))
    if sees(principal, begins):
        return None
    return _unauthorized(f"{field} must be given, and {principal.name} may look at {principal.reach}")


def sees(principal: Principal, begins: str | None) -> bool:
    """Whether somebody may look at all that begins so; None: at everything."""
    bounds = principal.bounds
    return bounds is None or (begins is not None and begins.startswith(bounds))


def _lacking(principal: Principal, right: str) -> str:
    may = ", ".join(sorted(principal.rights)) or "do nothing any more"
    return f"this needs the right to {right}; {principal.name} may {may}"


def _unauthorized(why: str, *, ref: str | None = None, id: int | None = None) -> RequestRejected:
    return RequestRejected(Code.UNAUTHORIZED, why, ref=ref, id=id)
