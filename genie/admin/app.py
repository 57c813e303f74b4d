"""The admin port as a whole: where it listens, and what is answered where."""

from __future__ import annotations

from aiohttp import web

from genie.admin.health import Health
from genie.admin.subject import Subject


class Admin:
    """Answers on a port of its own. With none in the settings it does nothing.

    `address` is where it listens, once it does.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._runner: web.AppRunner | None = None
        self.address: tuple[str, int] | None = None

    async def start(self) -> None:
        """Listen; OSError where the port can't be had."""
        settings = self._subject.settings
        if settings.admin_port is None:
            return
        app = web.Application()
        app.add_routes(Health(self._subject).routes())
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        try:
            tls = self._subject.admin_tls
            await web.TCPSite(self._runner, settings.admin_host, settings.admin_port, ssl_context=tls).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self.address = self._runner.addresses[0][:2]

    async def stop(self) -> None:
        """Answer no more."""
        if self._runner is not None:
            await self._runner.cleanup()
