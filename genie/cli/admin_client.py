"""What the commands that ask the admin port have in common: where it is, the token, one answer after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import aiohttp
import click
import msgspec

from genie.admin.models import Problem
from genie.cli.format import printable
from genie.cli.options import EmptiableOption, SourcedOption, namespace_option, source_of
from genie.client.config import find_token, format_address, parse_address, tls_context
from genie.config import Settings
from genie.errors import GenieError, RequestRejected, Unavailable
from genie.protocol import codec

_DEFAULTS = Settings()
TLS = "https://"
SCHEMES = (TLS, "http://")
MAX_ANSWER = 64 << 20
"""Bytes. Answers are far smaller: what sends more is something else."""

T = TypeVar("T")
P = ParamSpec("P")
Command = Callable[P, T]


def admin_options(command: Command[P, T]) -> Command[P, T]:
    """`--admin-host`, `--admin-port` and `--namespace`: where to ask, and about whose locks."""
    host = click.option(
        "--admin-host",
        cls=SourcedOption,
        default=_DEFAULTS.admin.host,
        envvar="GENIE_ADMIN_HOST",
        show_envvar=True,
        show_default=True,
        help="Host of the admin port; https://HOST where the server has a certificate.",
    )
    port = click.option(
        "--admin-port",
        cls=EmptiableOption,
        default=str(_DEFAULTS.admin.port),
        envvar="GENIE_ADMIN_PORT",
        show_envvar=True,
        show_default=True,
        help="The admin port.",
    )
    return host(port(namespace_option(command)))


class AdminPort:
    """Asks the admin port of one server. ValueError where that can't be one, GenieError where it gives no answer.

    GENIE_TOKEN, else the word in the file at GENIE_TOKEN_FILE, is what it is told. By TLS, GENIE_TLS_CA names who signs its certificate,
    and GENIE_TLS_CERT with GENIE_TLS_KEY is the one that it is shown. `namespace` is asked about, or the server's first.
    """

    def __init__(self, host: str, port: str, namespace: str | None, patience: float) -> None:
        if not port.strip():
            raise ValueError(f"there is no admin port: {source_of('admin_port')} is empty")
        self._scheme = next((scheme for scheme in SCHEMES if host.lower().startswith(scheme)), SCHEMES[-1])
        bare = host[len(self._scheme) :] if host.lower().startswith(self._scheme) else host
        bare = bare.strip().rstrip("/")
        if not bare or any(sign in bare for sign in "/?#@ "):
            raise ValueError(f"{source_of('admin_host')}: it is a name or an address, also as {TLS}HOST, not {host!r}")
        try:
            to = parse_address(bare, int(port) if port.strip().isdecimal() else 0)
        except ValueError as error:
            raise ValueError(f"{source_of('admin_host')}: {error}") from None
        if not 0 < to[1] < 1 << 16:
            raise ValueError(f"{source_of('admin_port')}: a port is a number from 1 to 65535, not {port!r}")
        self.where = format_address(to)
        self._asked = {} if namespace is None else {"namespace": namespace}
        self._patience = patience
        self._token = _token()
        self._ssl = tls_context() if self._scheme == TLS else True
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._patience),
            connector=aiohttp.TCPConnector(ssl=self._ssl),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._session is not None  # noqa: S101 - it was entered
        await self._session.close()

    async def get(self, path: str, limit: int | None = None) -> Any:
        """What is answered at a path, as plain data; at most `limit` of what there may be many of.

        RequestRejected says what the server says is wrong; Unavailable, that it can't be reached or is no admin port.
        """
        assert self._session is not None  # noqa: S101 - it was entered
        try:
            asked = self._asked | ({} if limit is None else {"limit": str(limit)})
            url = f"{self._scheme}{self.where}{path}"
            # a redirection would take the token to somebody else
            async with self._session.get(url, params=asked, allow_redirects=False) as response:
                status, body = response.status, bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MAX_ANSWER:
                        raise Unavailable(f"{self.where} answers with more than {MAX_ANSWER >> 20} MiB")
        except TimeoutError:
            raise Unavailable(f"{self.where} does not answer within {self._patience:g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise Unavailable(
                f"{self.where} shows a certificate that is not trusted (GENIE_TLS_CA names who signs it): "
                f"{error.certificate_error}"
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"can't connect to the admin port, {self.where}: {error.os_error}") from None
        except (aiohttp.ClientError, OSError) as error:
            tls = "" if self._scheme == TLS else f"; if it has a certificate, ask {TLS}{self.where}"
            raise Unavailable(f"{self.where} gives no answer by HTTP: {error or type(error).__name__}{tls}") from None
        return self._read(status, body)

    def _read(self, status: int, body: bytearray) -> Any:
        try:
            told = codec.loads(bytes(body))
            if status == HTTPStatus.OK:
                return told
            problem = msgspec.convert(told, Problem)
        except ValueError:
            raise Unavailable(
                f"{self.where} answers {status}, and not as the admin port of this version does"
            ) from None
        raise RequestRejected(printable(problem.code), printable(problem.message) + _hint(problem))


def ask_admin(port: AdminPort, question: Callable[[AdminPort], Awaitable[T]]) -> T:
    """Ask and leave."""

    async def asking() -> T:
        async with port:
            return await question(port)

    return asyncio.run(asking())


def known(told: Any, kind: type[T]) -> T:
    """An answer as its type; GenieError where its fields are others."""
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        raise GenieError(f"the server's answer is not as this version knows it: {error}") from None


def _hint(problem: Problem) -> str:
    if isinstance(problem.leader, str) and problem.leader not in problem.message:
        return f" ({printable(problem.leader)} leads: ask the admin port there)"
    return ""


def _token() -> str | None:
    """What the clients say. It goes into a header, where a line break would begin another."""
    said = find_token()
    if said is not None and not said.isprintable():
        raise ValueError("the token, from GENIE_TOKEN or GENIE_TOKEN_FILE, must not contain control characters")
    return said
