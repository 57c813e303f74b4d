"""The admin port as a whole: where it listens, and what is answered where."""

from __future__ import annotations

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
from genie.tls import name_of


class Admin:
    """Answers on a port of its own. With none in the settings it does nothing.

    `address` is where it listens, once it does.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._runner: web.AppRunner | None = None
        self.address: tuple[str, int] | None = None
        self.pace = Pace()

    async def start(self) -> None:
        """Listen; OSError where the port can't be had."""
        settings = self._subject.settings
        if settings.admin_port is None:
            return
        app = web.Application(middlewares=[as_answers], client_max_size=MAX_BODY)
        Guard(lambda: self._subject.access, settings.admin_host, _certificate).protect(app)
        app.on_response_prepare.append(_not_to_be_kept)
        turns = Turns(self.pace)
        app.add_routes(Health(self._subject).routes())
        app.add_routes(Page().routes())
        app.add_routes(Api(self._subject, turns).routes())
        app.add_routes(Scrape(self._subject, turns).routes())
        self._runner = Door(app)
        await self._runner.setup()
        try:
            where = settings.admin_host, settings.admin_port
            tls = self._subject.admin_tls
            await web.TCPSite(self._runner, *where, ssl_context=tls, backlog=BACKLOG).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self.address = self._runner.addresses[0][:2]

    async def stop(self) -> None:
        """Answer no more."""
        if self._runner is not None:
            await self._runner.cleanup()


def _certificate(request: web.Request) -> str | None:
    """The name in the certificate that was shown, if any: it was verified."""
    return name_of(request.get_extra_info("peercert"))


async def _not_to_be_kept(_: web.Request, response: web.StreamResponse) -> None:
    """What was true a moment ago is of no use to anybody, unless the answer says otherwise."""
    response.headers.setdefault("Cache-Control", "no-store")
