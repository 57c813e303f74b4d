"""An HTTP client of the admin port, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from genie.admin import models

T = TypeVar("T")


@dataclass(frozen=True)
class AdminResponse:
    status: int
    headers: dict[str, str]
    body: bytes

    def as_(self, kind: type[T]) -> T:
        """Decode a successful response, which must have exactly the fields of this type."""
        assert self.status == 200, self.body
        assert self.headers["content-type"].startswith("application/json")
        decoded = msgspec.json.decode(self.body, type=kind)
        assert msgspec.json.decode(self.body) == msgspec.to_builtins(decoded)
        return decoded

    @property
    def problem(self) -> tuple[int, str, str]:
        """The status, the code and the message of an error response."""
        problem = msgspec.json.decode(self.body, type=models.Problem)
        return self.status, problem.code, problem.message

    @property
    def leader(self) -> object:
        return msgspec.json.decode(self.body, type=models.Problem).leader


async def fetch(
    port: int, path: str, *, method: str = "GET", body: bytes | None = None, headers: dict[str, str] | None = None
) -> AdminResponse:
    """Send one request on a connection of its own. The path is sent as it is."""
    from yarl import URL

    async with aiohttp.ClientSession() as session:
        url = URL(f"http://127.0.0.1:{port}{path}", encoded=True)
        async with session.request(method, url, data=body, headers=headers) as response:
            return AdminResponse(
                response.status,
                {name.lower(): value for name, value in response.headers.items()},
                await response.read(),
            )


async def release(port: int, body: bytes, query: str = "") -> AdminResponse:
    return await fetch(
        port,
        "/api/release" + query,
        method="POST",
        body=body,
        headers={"Content-Type": "application/json", "X-Genie": "1"},
    )
