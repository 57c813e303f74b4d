"""Is it alive, is it ready, does it lead: for those who start, stop and address servers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.resources import files

from aiohttp import web
from prometheus_client import exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as open_exposition
from prometheus_client.registry import Collector

from genie.admin import api
from genie.admin.interfaces import NamespaceView, Subject
from genie.admin.throttle import Body, Turns
from genie.observability.metrics import Metrics, Source

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
            f"{namespace}: {why}\n" for namespace, view in self._subject.namespaces.items() if (why := _missing(view))
        ]
        return web.Response(status=AWAY, text="".join(missing)) if missing else web.Response(text="ok\n")

    async def leads(self, request: web.Request) -> web.Response:
        """Commands are carried out here, for the namespace that is asked for or the first."""
        namespaces = self._subject.namespaces
        view = namespaces[api.read_namespace(request, namespaces)]
        if view.role == "leader":
            return web.Response(text="ok\n")
        where = "" if view.leader is None else f"; {view.leader} leads"
        return web.Response(status=AWAY, text=f"{view.role}{where}\n")


def _missing(view: NamespaceView) -> str:
    """Why a namespace is not ready; empty where it is."""
    if view.role in ("starting", "stopping"):
        return view.role
    return "" if view.store_available else "the store does not answer"


# -- `/metrics`, for Prometheus --------

OPEN = "application/openmetrics-text"
END = b"# EOF\n"
"""The last line in OpenMetrics."""
PART_WORK = 20
SAMPLE_WORK = 12
"""What it takes to write a metric of one namespace, and each of its samples."""


class Scrape:
    """The metrics of a server, in Prometheus' words or in those of OpenMetrics where they are asked for."""

    def __init__(self, source: Source, turns: Turns) -> None:
        self._metrics = Metrics(source)
        self._turns = turns

    def routes(self) -> Iterable[web.RouteDef]:
        """Where it is. (Parameters are let pass: Prometheus adds what it is told to.)"""
        return [web.get("/metrics", self.metrics, allow_head=False)]

    async def metrics(self, request: web.Request) -> web.Response:
        """All of them: a constant number, a few at a time."""
        as_open = OPEN in request.headers.get("Accept", "")
        write = open_exposition.generate_latest if as_open else exposition.generate_latest
        content_type = open_exposition.CONTENT_TYPE_LATEST if as_open else exposition.CONTENT_TYPE_PLAIN_0_0_4

        async def made() -> Body:
            lines: list[bytes] = []
            last = ""
            for part in self._metrics.parts():
                written = write(_One(part)).removesuffix(END)
                lines.append(_without_head(written) if part.name == last else written)
                last = part.name
                await self._turns.pace.did(PART_WORK + SAMPLE_WORK * len(part.samples))
            return (b"".join([*lines, END if as_open else b""]),)

        (body,) = await self._turns.answer(("metrics", as_open), made)
        return web.Response(body=body, headers={"Content-Type": content_type})


class _One(Collector):
    """A metric by itself."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """It."""
        return [self._family]


def _without_head(written: bytes) -> bytes:
    """The samples without the lines that say what the metric is: they stand above those of the first namespace."""
    return b"".join(line for line in written.splitlines(keepends=True) if not line.startswith(b"#"))


# -- The page for people, at `/`: plain files that ask the API, and nobody else, what to show --------

INDEX = "index.html"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""The content type of a file, by how its name ends."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser may do with the page: names that clients made up stay text, whatever they are."""


class Page:
    """The files of the folder `page`, each at its name, and the index at `/`. They are read once."""

    def __init__(self) -> None:
        self._files = {
            "/" if file.name == INDEX else f"/{file.name}": (TYPES[file.name.rpartition(".")[2]], file.read_bytes())
            for file in files(__package__).joinpath("page").iterdir()
        }

    def routes(self) -> Iterable[web.RouteDef]:
        """Where each is."""
        return [web.get(path, self.file) for path in sorted(self._files)]

    async def file(self, request: web.Request) -> web.Response:
        """One of the files. A browser asks each time whether it is still the same."""
        kind, body = self._files[request.path]
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": POLICY,
            "ETag": tag,
            "X-Content-Type-Options": "nosniff",
        }
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)
