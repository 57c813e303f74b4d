"""A fake admin port that responds with what the test sets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web

from genie.admin import models


class FakeAdmin:
    """Responds with `responses` by path: a Struct, or bytes as they are; other paths are not found.

    `status` is the HTTP status of bytes and of a Problem. `paths` are the requested ones with their queries.
    """

    def __init__(self) -> None:
        self.responses: dict[str, models.ApiModel | bytes] = {}
        self.status = 503
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.port = 0

    async def respond(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        self.paths.append(request.path_qs)
        response = self.responses.get(request.path, models.Problem(code="not-found", message=f"no {request.path}"))
        if isinstance(response, bytes):
            return web.Response(status=self.status, body=response)
        status = self.status if isinstance(response, models.Problem) else 200
        return web.Response(status=status, body=msgspec.json.encode(response), content_type="application/json")


@contextmanager
def fake_admin(port: int = 0, **options: Any) -> Iterator[FakeAdmin]:
    """Run a fake admin port in a thread. `options` are those of the listening socket, as `ssl_context`."""
    admin, loop = FakeAdmin(), asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", admin.respond)])
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, **options).start()
        admin.port = runner.addresses[0][1]
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield admin
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
