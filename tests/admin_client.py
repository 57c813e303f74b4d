"""Asks an admin port, as operators and their tools do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from genie.admin import models

T = TypeVar("T")


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    def as_(self, kind: type[T]) -> T:
        """What was answered, which must be of this kind, without a field more or less."""
        assert self.status == 200, self.body
        assert self.headers["content-type"].startswith("application/json")
        told = msgspec.json.decode(self.body, type=kind)
        assert msgspec.json.decode(self.body) == msgspec.to_builtins(told)
        return told

    @property
    def problem(self) -> tuple[int, str, str]:
        """The status, the code and the message of what went wrong."""
        told = msgspec.json.decode(self.body, type=models.Problem)
        return self.status, told.code, told.message

    @property
    def leader(self) -> object:
        return msgspec.json.decode(self.body, type=models.Problem).leader


async def ask(
    port: int,
    path: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answered:
    """One question on a connection of its own. The path is sent as it is."""
    from yarl import URL

    async with aiohttp.ClientSession() as session:
        url = URL(f"http://127.0.0.1:{port}{path}", encoded=True)
        async with session.request(method, url, data=body, headers=headers) as answer:
            return Answered(
                answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()
            )


async def release(port: int, body: bytes, query: str = "") -> Answered:
    return await ask(
        port,
        "/api/release" + query,
        method="POST",
        body=body,
        headers={"Content-Type": "application/json", "X-Genie": "1"},
    )
