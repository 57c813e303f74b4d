"""The admin port as a whole: where it listens, and what is answered where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from aiohttp import web

from genie.admin.api import Api
from genie.admin.door import BACKLOG, Door
from genie.admin.guard import Guard
from genie.admin.health import Health
from genie.admin.pace import Pace
from genie.admin.page import Page
from genie.admin.problems import MAX_BODY, as_answers
from genie.admin.scrape import Scrape
from genie.admin.subject import Subject
from genie.admin.turns import Turns
from genie.errors import Code
from genie.tls import name_of

HANDSHAKE_S: Final = 5.0
"""How long a client may take to agree on TLS. Until it has, it is none of those that may be connected."""


class Admin:
    """Answers on a port of its own. With none in the settings it does nothing.

    `address` is where it listens, once it does.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self.address: tuple[str, int] | None = None
        self.pace = Pace()

    async def start(self) -> None:
        """Listen; OSError where the port can't be had."""
        settings = self._subject.settings
        if settings.admin_port is None:
            return
        app = web.Application(middlewares=[as_answers], client_max_size=MAX_BODY)
        Guard(lambda: self._subject.access, settings.admin_host, _certificate, self._refused).protect(app)
        app.on_response_prepare.append(_not_to_be_kept)
        turns = Turns(self.pace)
        app.add_routes(Health(self._subject).routes())
        app.add_routes(Page().routes())
        app.add_routes(Api(self._subject, turns).routes())
        app.add_routes(Scrape(self._subject, turns).routes())
        self._runner = Door(app)
        await self._runner.setup()
        try:
            tls = self._subject.admin_tls
            self._listener = await asyncio.get_running_loop().create_server(
                cast("Callable[[], asyncio.Protocol]", self._runner.server),
                settings.admin_host,
                settings.admin_port,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
                backlog=BACKLOG,
            )
        except BaseException:
            await self._runner.cleanup()
            raise
        self.address = self._listener.sockets[0].getsockname()[:2]

    def _refused(self) -> None:
        self._subject.stats.errors[Code.UNAUTHORIZED] += 1

    async def stop(self) -> None:
        """Answer no more."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()


def _certificate(request: web.Request) -> str | None:
    """The name in the certificate that was shown, if any: it was verified."""
    return name_of(request.get_extra_info("peercert"))


async def _not_to_be_kept(_: web.Request, response: web.StreamResponse) -> None:
    """What was true a moment ago is of no use to anybody, unless the answer says otherwise."""
    response.headers.setdefault("Cache-Control", "no-store")
