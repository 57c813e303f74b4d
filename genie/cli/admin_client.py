"""The HTTP client of the commands that query the admin port, and their common options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from genie.admin.models import Problem
from genie.cli.options import (
    MAX_PORT,
    EmptiableOption,
    namespace_option,
    one_line_errors,
    run_async,
    source_of,
    timeout_option,
    variable_option,
)
from genie.client.config import format_address, parse_address, resolve_token, tls_context
from genie.config import Settings
from genie.errors import GenieError, RequestRejected, Unavailable
from genie.protocol import codec
from genie.text import printable

_DEFAULTS = Settings().admin
HTTPS = "https://"
HTTP = "http://"
MAX_RESPONSE_BYTES = 64 << 20
"""Maximum size of a response. Responses of the admin port are far smaller."""

T = TypeVar("T")
Command = Callable[..., T]


def admin_query(command: Command[T]) -> Command[T]:
    """Add `--admin-host`, `--admin-port`, `--namespace` and `--timeout`, and pass the command an `AdminClient` as `admin`.

    An error of the command is printed in one line.
    """

    @functools.wraps(command)
    def with_admin(*, admin_host: str, admin_port: str, namespace: str | None, timeout: float, **options: Any) -> T:
        return command(admin=AdminClient(admin_host, admin_port, namespace, timeout), **options)

    admin_host_option = variable_option(
        "--admin-host",
        "Host of the admin port; https://HOST if the server has a certificate.",
        default=_DEFAULTS.host,
        show_default=True,
    )
    admin_port_option = variable_option(
        "--admin-port", "Admin port.", cls=EmptiableOption, default=str(_DEFAULTS.port), show_default=True
    )
    return admin_host_option(admin_port_option(namespace_option(timeout_option(one_line_errors(with_admin)))))


class AdminClient:
    """Queries the admin port of one server. Raises ValueError for an invalid address, GenieError if a query fails.

    The bearer token is that of GENIE_TOKEN or of the file GENIE_TOKEN_FILE. For TLS, GENIE_TLS_CA is the CA to trust, and
    GENIE_TLS_CERT and GENIE_TLS_KEY are the client's certificate and its key.
    """

    def __init__(self, host: str, port: str, namespace: str | None, timeout_s: float) -> None:
        self._scheme, self.address = _parse_admin_address(host, port)
        self._query_parameters = {} if namespace is None else {"namespace": namespace}
        """Without a namespace, the server responds about its first namespace."""
        self._timeout_s = timeout_s
        """Time limit of one query."""
        self._token = _read_token()
        # For HTTP, the default of aiohttp, which is not used.
        self._ssl = tls_context() if self._scheme == HTTPS else True
        self._session: aiohttp.ClientSession | None = None
        """None until the client is entered as an async context manager."""

    async def __aenter__(self) -> Self:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(ssl=self._ssl),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._session is not None  # noqa: S101 - set by `__aenter__`
        await self._session.close()

    async def fetch(self, path: str, kind: type[T], limit: int | None = None) -> tuple[Any, T]:
        """Send a GET request for a path. Return the decoded JSON response, and the same response converted to `kind`.

        Args:
            path: the path of the URL, such as `/api/deadlocks`.
            kind: the type of the response.
            limit: the maximum number of rows. None selects the default of the path.

        Raises:
            RequestRejected: if the server responds with an error.
            Unavailable: if the server cannot be reached, or is not an admin port.
            GenieError: if the response does not have the type `kind`, for example because the server has another version.

        """
        status, body = await self._get(path, limit)
        try:
            response = codec.loads(body)
            problem = None if status == HTTPStatus.OK else msgspec.convert(response, Problem)
        except ValueError:
            raise Unavailable(
                f"{self.address} responded {status}, but not in the format of the admin port of this version"
            ) from None
        if problem is not None:
            raise RequestRejected(printable(problem.code), printable(problem.message) + _leader_hint(problem))
        try:
            return response, msgspec.convert(response, kind)
        except msgspec.ValidationError as error:
            raise GenieError(f"unexpected reply, the server may have another version: {error}") from None

    async def _get(self, path: str, limit: int | None) -> tuple[int, bytes]:
        """Return the status and the body of the response to a GET request."""
        assert self._session is not None  # noqa: S101 - set by `__aenter__`
        parameters = dict(self._query_parameters)
        if limit is not None:
            parameters["limit"] = str(limit)
        url = f"{self._scheme}{self.address}{path}"
        try:
            # Without redirects, because a redirect would send the token to another server.
            async with self._session.get(url, params=parameters, allow_redirects=False) as response:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MAX_RESPONSE_BYTES:
                        raise Unavailable(f"{self.address} sent a response of more than {MAX_RESPONSE_BYTES >> 20} MiB")
                return response.status, bytes(body)
        except TimeoutError:
            raise Unavailable(f"{self.address} did not respond within {self._timeout_s:g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise Unavailable(
                f"{self.address} has an untrusted certificate (GENIE_TLS_CA is the CA to trust): "
                f"{error.certificate_error}"
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"cannot connect to the admin port {self.address}: {error.os_error}") from None
        except (aiohttp.ClientError, OSError) as error:
            hint = "" if self._scheme == HTTPS else f"; if it has a certificate, use {HTTPS}{self.address}"
            raise Unavailable(
                f"{self.address} did not respond in HTTP: {error or type(error).__name__}{hint}"
            ) from None

    def query(self, path: str, kind: type[T], limit: int | None = None) -> tuple[Any, T]:
        """Connect, `fetch` one path, and disconnect, all in a new event loop."""
        return self.run(lambda: self.fetch(path, kind, limit))

    def run(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Connect, run an operation that fetches paths, and disconnect, all in a new event loop."""

        async def connect_and_run() -> T:
            async with self:
                return await operation()

        return run_async(connect_and_run())


def _parse_admin_address(host: str, port: str) -> tuple[str, str]:
    """Return the URL scheme and the address `HOST:PORT` of an admin port.

    Raises ValueError if the host or the port is invalid. The message names the option or environment variable to fix.
    """
    if not port.strip():
        raise ValueError(f"no admin port: {source_of('admin_port')} is empty")
    scheme, host_name = HTTP, host
    for prefix in (HTTPS, HTTP):
        if host.lower().startswith(prefix):
            scheme, host_name = prefix, host[len(prefix) :]
    host_name = host_name.strip().rstrip("/")
    if not host_name or any(character in host_name for character in "/?#@ "):
        raise ValueError(
            f"{source_of('admin_host')}: must be a host name or an address, also as {HTTPS}HOST, not {host!r}"
        )
    port_number = int(port) if port.strip().isdecimal() else 0  # 0 is rejected below, like a number out of range
    try:
        address = parse_address(host_name, port_number)
    except ValueError as error:
        raise ValueError(f"{source_of('admin_host')}: {error}") from None
    if not 0 < address.port <= MAX_PORT:
        raise ValueError(f"{source_of('admin_port')}: a port is a number from 1 to {MAX_PORT}, not {port!r}")
    return scheme, format_address(address)


def _leader_hint(problem: Problem) -> str:
    """Return a suffix for the error message that names the leader, or an empty text.

    The text is empty if the leader is unknown, or the message already names the leader.
    """
    if isinstance(problem.leader, str) and problem.leader not in problem.message:
        return f" ({printable(problem.leader)} leads: query its admin port)"
    return ""


def _read_token() -> str | None:
    """Return the token that the environment variables configure, or None.

    Raises ValueError if the token contains control characters: a line break would start another HTTP header.
    """
    token = resolve_token()
    if token is not None and not token.isprintable():
        raise ValueError("the token of GENIE_TOKEN or GENIE_TOKEN_FILE must not contain control characters")
    return token
