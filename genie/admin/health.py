"""Is it alive, is it ready, does it lead: for those who start, stop and address servers."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from genie.admin.subject import Subject

OK, AWAY = 200, 503


class Health:
    """`/livez`, `/readyz`, `/leaderz`: 200, or 503 with the reason as text."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def routes(self) -> Iterable[web.RouteDef]:
        """Where each is."""
        return [
            web.get("/livez", self.live),
            web.get("/readyz", self.ready),
            web.get("/leaderz", self.leads),
        ]

    async def live(self, _: web.Request) -> web.Response:
        """The event loop turns: otherwise nobody would answer."""
        return web.Response(text="ok\n")

    async def ready(self, _: web.Request) -> web.Response:
        """Its role is known, it reaches its store, and it is not about to stop."""
        subject = self._subject
        if subject.role in ("starting", "stopping"):
            return web.Response(status=AWAY, text=f"{subject.role}\n")
        if not subject.reaches_store:
            return web.Response(status=AWAY, text="the store does not answer\n")
        return web.Response(text="ok\n")

    async def leads(self, _: web.Request) -> web.Response:
        """Commands are carried out here."""
        subject = self._subject
        if subject.role == "leader":
            return web.Response(text="ok\n")
        where = "" if subject.leader is None else f"; {subject.leader} leads"
        return web.Response(status=AWAY, text=f"{subject.role}{where}\n")
