"""Who may ask what of the admin port, and what a browser is told beside each answer.

It goes by the path that was matched and the method, and knows nothing of what is answered there.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final
from urllib.parse import urlsplit

import msgspec
import structlog
from aiohttp import hdrs, web

from genie.access import ADMIN, INSPECT, AccessControl, Principal
from genie.admin.models import Problem
from genie.errors import Code

log = structlog.get_logger()

API: Final = "/api"
METRICS: Final = "/metrics"
PRINCIPAL: ContextVar[Principal | None] = ContextVar("PRINCIPAL", default=None)
"""Who made the request that is being answered, where somebody was asked."""
MARK: Final = "X-Genie"
"""A header that no form and no link can send: only a script may, and another site's only if it is allowed to."""
JSON: Final = "application/json"
EVERYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104 - it is compared

HEADERS: Final = {
    "Server": "genie",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guard:
    """`access` says who may come in at present, `certificate` the name in a request's certificate, if any.

    `refused` is told of each stranger.
    """

    def __init__(
        self,
        access: Callable[[], AccessControl],
        host: str,
        certificate: Callable[[web.Request], str | None] = lambda _: None,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._refused = refused
        self._access = access
        self._host = host.strip("[]").lower()
        self._certificate = certificate

    def protect(self, app: web.Application) -> None:
        """Stand before everything that an application answers."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self.watch(request, handler)

        app.middlewares.append(guarded)
        app.on_response_prepare.append(_add_headers)

    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer who may not ask, and let the others through."""
        PRINCIPAL.set(None)
        refused = self._refusal(request)
        if refused is not None:
            return refused
        return await handler(request)

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not _is_guarded(request):
            return None
        access = self._access()
        if access.open:
            if not self._is_ours(request.headers.get(hdrs.HOST, "")):
                why = "the Host header must name this machine itself (127.0.0.1, localhost), as long as no token is set"
                return _problem(403, why)
        else:
            refused = self._unauthorized(request, access)
            if refused is not None:
                return refused
        if request.method in (hdrs.METH_GET, hdrs.METH_HEAD) or request.match_info.http_exception is not None:
            return None  # nothing is changed by it
        return _forged(request)

    def _unauthorized(self, request: web.Request, access: AccessControl) -> web.Response | None:
        principal = self._who(request, access)
        if principal is None:
            no_token = hdrs.AUTHORIZATION not in request.headers
            log.warning(
                "authentication failed at the admin port",
                reason="no token" if no_token else "unknown token",
                peer=request.remote,
                path=request.path[:200],
            )
            self._refused()
            wrong = "the request carried no token" if no_token else "the token of the request is not known"
            response = _problem(401, f"{wrong}; send one of this server: Authorization: Bearer TOKEN")
            response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
            return response
        PRINCIPAL.set(principal)
        right = INSPECT if request.method in (hdrs.METH_GET, hdrs.METH_HEAD) else ADMIN
        if not principal.has_permission(right):
            return _problem(403, f"this needs the right to {right}, which {principal.name} has not")
        if principal.visible_prefixes is not None and not _is_metrics(request):
            why = f"{principal.name} may look at {principal.scope_description} only, and this shows all: ask the server by the wire"
            return _problem(403, why)
        return None

    def _who(self, request: web.Request, access: AccessControl) -> Principal | None:
        said = request.headers.get(hdrs.AUTHORIZATION)
        if said is not None:
            scheme, _, token = said.partition(" ")
            return access.by_token(token.strip()) if scheme.lower() == "bearer" else None
        name = self._certificate(request)
        return None if name is None else access.by_certificate(name)

    def _is_ours(self, host: str) -> bool:
        """Whether a page of this very port asks. A name of another site may have been made to lead here (DNS rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname
            if name is not None and name in ("localhost", self._host):
                return True
            address = ipaddress.ip_address(name or "")
        except ValueError:
            return False
        return address.is_loopback or self._host in EVERYWHERE


def _is_guarded(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    paths = {request.path, request.raw_path} | ({resource.canonical} if resource is not None else set())
    return any(path == API or path.startswith((API + "/", METRICS)) for path in paths)


def _is_metrics(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical == METRICS


def _forged(request: web.Request) -> web.Response | None:
    """Why a request that changes something may have been made by another site's page, if so."""
    headers = request.headers
    if request.content_type != JSON or MARK not in headers:
        return _problem(403, f"send it as Content-Type: {JSON} and with the header {MARK}: 1")
    site, origin = headers.get("Sec-Fetch-Site"), headers.get(hdrs.ORIGIN)
    if site not in (None, "same-origin", "none"):
        return _problem(403, "another site's page asks, as Sec-Fetch-Site says")
    if origin is not None and origin.partition("://")[2] != headers.get(hdrs.HOST):
        return _problem(403, "another site's page asks: Origin must be that of Host")
    return None


def _problem(status: int, message: str) -> web.Response:
    body = msgspec.json.encode(Problem(code=Code.UNAUTHORIZED, message=message))
    return web.Response(status=status, body=body, content_type=JSON)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        if name not in response.headers or name == hdrs.SERVER:
            response.headers[name] = value
