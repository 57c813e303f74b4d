"""Is it alive, is it ready, does it lead: for those who start, stop and address servers."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from genie.admin import parameters
from genie.admin.subject import Seat, Subject

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
        """Of each namespace it is known who leads, its store is reached, and the server is not about to stop."""
        missing = [
            f"{namespace}: {why}\n" for namespace, seat in self._subject.seats.items() if (why := _missing(seat))
        ]
        return web.Response(status=AWAY, text="".join(missing)) if missing else web.Response(text="ok\n")

    async def leads(self, request: web.Request) -> web.Response:
        """Commands are carried out here, for the namespace that is asked for or the first."""
        seats = self._subject.seats
        seat = seats[parameters.namespace(request, seats)]
        if seat.role == "leader":
            return web.Response(text="ok\n")
        where = "" if seat.leader is None else f"; {seat.leader} leads"
        return web.Response(status=AWAY, text=f"{seat.role}{where}\n")


def _missing(seat: Seat) -> str:
    """Why a namespace is not ready; empty where it is."""
    if seat.role in ("starting", "stopping"):
        return seat.role
    return "" if seat.reaches_store else "the store does not answer"
