"""Security of the admin port: authentication, DNS rebinding, forged requests (CSRF), response headers.

The checks depend only on the path and the method of a request, so a handler cannot omit them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web

from genie.access import ADMIN, INSPECT, AccessControl, Principal
from genie.admin.models import Problem
from genie.errors import Code
from genie.observability.limited_log import log_limited

API: Final = "/api"
METRICS: Final = "/metrics"
PRINCIPAL: ContextVar[Principal | None] = ContextVar("PRINCIPAL", default=None)
"""The principal of the current request. None if clients need no token."""
CSRF_HEADER: Final = "X-Genie"
"""A header that state-changing requests must contain. Forms and links of other sites cannot send the header, and
browsers do not let scripts of other sites send it without CORS permission."""
JSON: Final = "application/json"
HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
"""A Host header: a name, an IPv4 address or an IPv6 address in brackets, and optionally a port (RFC 9110)."""
WILDCARD_HOSTS: Final = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound

HEADERS: Final = {
    "Server": "genie",
    # Clients choose the names of resources. The policy prevents that a browser executes scripts in such a name.
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


class RequestGuard:
    """Checks requests before their handlers run.

    `get_access` returns the current access control. `host` is the configured address of the admin port.
    `get_certificate_name` returns the name in the verified client certificate of a request, or None if it has none.
    `on_unauthenticated` is called for each failed authentication.
    """

    def __init__(
        self,
        get_access: Callable[[], AccessControl],
        host: str,
        get_certificate_name: Callable[[web.Request], str | None] = lambda _: None,
        on_unauthenticated: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_unauthenticated = on_unauthenticated
        self._get_access = get_access
        self._configured_host = host.strip("[]").lower()
        """In the form of the results of `urlsplit`: in lower case, and an IPv6 address without brackets."""
        self._get_certificate_name = get_certificate_name

    def install(self, app: web.Application) -> None:
        """Add the checks and the response headers to an application."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            PRINCIPAL.set(None)
            error = self._check_request(request)
            return await handler(request) if error is None else error

        app.middlewares.append(guarded)
        app.on_response_prepare.append(_add_headers)

    def _check_request(self, request: web.Request) -> web.Response | None:
        """Return an error response if the request is not allowed, else None. Sets `PRINCIPAL`.

        Public paths are always allowed. If clients need no token, the Host header must be trusted. Otherwise the
        request must be authorized. Requests that change something are checked for forgery (CSRF) as well.
        """
        if not _is_guarded(request):
            return None
        access = self._get_access()
        error = self._host_error(request) if access.allows_anonymous else self._authorization_error(request, access)
        has_handler = request.match_info.http_exception is None
        if error is None and has_handler and not _is_read(request):
            error = _csrf_error(request)
        return error

    def _host_error(self, request: web.Request) -> web.Response | None:
        """Return an error response if the Host header of a request does not name this machine, else None."""
        if self._is_trusted_host(request.headers.get(hdrs.HOST, "")):
            return None
        return _problem(403, "without a token the Host header must name this machine (127.0.0.1 or localhost)")

    def _authorization_error(self, request: web.Request, access: AccessControl) -> web.Response | None:
        """Authenticate a request, set `PRINCIPAL`, and check the permissions of the principal.

        Returns an error response, or None if the request is authorized. A failed authentication is logged and counted.
        """
        principal = self._authenticate(request, access)
        if principal is None:
            return self._reject_unauthenticated(request)
        PRINCIPAL.set(principal)
        permission = INSPECT if _is_read(request) else ADMIN
        if not principal.has_permission(permission):
            return _problem(403, f"{principal.name} lacks the permission {permission}")
        if not principal.sees_all and not _is_metrics(request):
            message = (
                f"{principal.name} may only inspect {principal.scope_description}, and the admin port shows all resources: "
                "use genie inspect"
            )
            return _problem(403, message)
        return None

    def _reject_unauthenticated(self, request: web.Request) -> web.Response:
        """Log and count a failed authentication, and return an error response."""
        has_token = hdrs.AUTHORIZATION in request.headers
        log_limited(
            "warning",
            "admin authentication failed",
            reason="unknown token" if has_token else "no token",
            peer=request.remote,
            path=request.path[:200],
        )
        self._on_unauthenticated()
        cause = "unknown token" if has_token else "missing token"
        response = _problem(401, f"{cause}: send Authorization: Bearer TOKEN with a token of this server")
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
        return response

    def _authenticate(self, request: web.Request, access: AccessControl) -> Principal | None:
        """Return the principal of the bearer token, or if the request has none, of the client certificate.

        Returns None if the token or the certificate is missing or unknown.
        """
        header = request.headers.get(hdrs.AUTHORIZATION)
        if header is not None:
            scheme, _, token = header.partition(" ")
            return access.by_token(token.strip()) if scheme.lower() == "bearer" else None
        name = self._get_certificate_name(request)
        return None if name is None else access.by_certificate(name)

    def _is_trusted_host(self, host: str) -> bool:
        """Return whether `host`, a Host header, names this machine.

        This check prevents DNS rebinding: a foreign domain resolves to this machine, and a browser sends this domain
        in the Host header. IP addresses are trusted if they are loopback addresses, or if the admin port listens on all
        addresses.
        """
        if HOST.fullmatch(host) is None:
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name and name in ("localhost", self._configured_host):
                return True
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._configured_host in WILDCARD_HOSTS


def _is_read(request: web.Request) -> bool:
    """Return whether a request changes nothing."""
    return request.method in (hdrs.METH_GET, hdrs.METH_HEAD)


def _is_guarded(request: web.Request) -> bool:
    """Return whether a request is for the API or the metrics, and so needs authorization.

    Health checks and the files of the status page are public.
    """
    # The decoded path, the path as sent, and the path of the matched route may differ. One match is sufficient.
    paths = (request.path, request.raw_path, _route_path(request))
    return any(path == API or path.startswith((API + "/", METRICS)) for path in paths)


def _is_metrics(request: web.Request) -> bool:
    """Return whether a request is for the metrics."""
    return _route_path(request) == METRICS


def _route_path(request: web.Request) -> str:
    """Return the path of the route that matches a request, or an empty text if none does."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _csrf_error(request: web.Request) -> web.Response | None:
    """Return an error response if a page of another site may have sent this state-changing request, else None."""
    headers = request.headers
    # Not `request.content_type`, whose parser takes 0.2 s for 8 KiB of parameters.
    content_type = headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
    if content_type != JSON or CSRF_HEADER not in headers:
        return _problem(403, f"the headers Content-Type: {JSON} and {CSRF_HEADER}: 1 are required")
    site, origin = headers.get("Sec-Fetch-Site"), headers.get(hdrs.ORIGIN)
    if site not in (None, "same-origin", "none"):
        return _problem(403, f"cross-site request: Sec-Fetch-Site is {site[:64]!r}, not same-origin")
    if origin is not None and origin.partition("://")[2] != headers.get(hdrs.HOST):
        return _problem(403, "cross-site request: Origin must match Host")
    return None


def _problem(status: int, message: str) -> web.Response:
    """Return an error response with this HTTP status and the error code `unauthorized`."""
    body = msgspec.json.encode(Problem(code=Code.UNAUTHORIZED, message=message))
    return web.Response(status=status, body=body, content_type=JSON)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers that a response does not have yet, and replace the header Server."""
    for name, value in HEADERS.items():
        if name not in response.headers or name == hdrs.SERVER:
            response.headers[name] = value
