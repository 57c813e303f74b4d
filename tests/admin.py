"""An admin port that the test speaks for: it answers with what it is given, and with problems."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web

from genie.admin import models


class SpokenAdmin:
    """`answers` are by path: a Struct, or bytes as they are. `status` is for those and for a Problem. `asked` has the paths."""

    def __init__(self) -> None:
        self.answers: dict[str, models.Answer | bytes] = {}
        self.status = 503
        self.headers: list[dict[str, str]] = []
        self.asked: list[str] = []
        self.port = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        self.asked.append(request.path_qs)
        told = self.answers.get(request.path, models.Problem(code="not-found", message=f"no {request.path}"))
        if isinstance(told, bytes):
            return web.Response(status=self.status, body=told)
        status = self.status if isinstance(told, models.Problem) else 200
        return web.Response(status=status, body=msgspec.json.encode(told), content_type="application/json")


@contextmanager
def spoken_admin(port: int = 0, **options: Any) -> Iterator[SpokenAdmin]:
    """It listens in a thread of its own. `options` are those of the listening socket, as `ssl_context`."""
    admin, loop = SpokenAdmin(), asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", admin.answer)])
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
