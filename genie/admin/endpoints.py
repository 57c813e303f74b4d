"""The endpoints outside the API: health checks, metrics, and the files of the status page."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from importlib.resources import files

from aiohttp import web
from prometheus_client import exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from genie.admin import api
from genie.admin.interfaces import ServerView
from genie.admin.security import HEADERS
from genie.admin.throttle import Body, ResponseCache
from genie.observability import metrics
from genie.observability.roles import describe, is_ready

UNAVAILABLE = 503
HEALTH_PATHS = ("/livez", "/readyz", "/leaderz")


class HealthEndpoints:
    """`/livez`, `/readyz` and `/leaderz`. They respond 200, or 503 with the reason as text."""

    def __init__(self, server: ServerView) -> None:
        self._server = server

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the routes of the health checks."""
        return map(web.get, HEALTH_PATHS, (self.live, self.ready, self.leader))

    async def live(self, _: web.Request) -> web.Response:
        """Respond 200. Any response shows that the event loop runs."""
        return web.Response(text="ok\n")

    async def ready(self, _: web.Request) -> web.Response:
        """Respond 200 if the server is ready in each namespace: it leads with an available store, or could take over at once.

        With either status, the body has a line for each namespace.
        """
        views = self._server.namespaces
        body = "".join(f"{name}: {describe(view)}\n" for name, view in views.items())
        is_ready_everywhere = all(map(is_ready, views.values()))
        return web.Response(status=200 if is_ready_everywhere else UNAVAILABLE, text=body)

    async def leader(self, request: web.Request) -> web.Response:
        """Respond 200 if this server leads the requested namespace, by default the first one, and its store is available."""
        namespaces = self._server.namespaces
        view = namespaces[api.read_namespace(request, namespaces)]
        if view.role == "leader" and view.store_available:
            return web.Response(text="ok\n")
        return web.Response(status=UNAVAILABLE, text=f"{describe(view)}\n")


# -- `/metrics`, for Prometheus --------

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_EOF = b"# EOF\n"
"""The last line of the OpenMetrics format."""
METRIC_WORK = 20
"""Work units for writing a metric of one namespace, in addition to the work for its samples."""
SAMPLE_WORK = 12
"""Work units for writing one sample of a metric."""


class MetricsEndpoint:
    """`/metrics`, in the text format of Prometheus, or in OpenMetrics if the client accepts it."""

    def __init__(self, server: metrics.ServerView, cache: ResponseCache) -> None:
        self._metrics = metrics.Metrics(server)
        self._cache = cache

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the route. The handler ignores query parameters, which Prometheus may be configured to send."""
        return [web.get("/metrics", self.metrics, allow_head=False)]

    async def metrics(self, request: web.Request) -> web.Response:
        """Respond with all metrics, from the cache if possible. The header Accept selects the format."""
        as_openmetrics = OPENMETRICS in request.headers.get("Accept", "")
        content_type = openmetrics.CONTENT_TYPE_LATEST if as_openmetrics else exposition.CONTENT_TYPE_PLAIN_0_0_4

        async def compute() -> Body:
            if as_openmetrics:
                return (await self._write(openmetrics.generate_latest) + OPENMETRICS_EOF,)
            return (await self._write(exposition.generate_latest),)

        (body,) = await self._cache.get_or_compute(("metrics", content_type), compute)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _write(self, write: Callable[[Collector], bytes]) -> bytes:
        """Write all metrics with a function of prometheus_client, without the end of the OpenMetrics format.

        Between two metrics, the work budget may yield to the event loop.
        """
        blocks: list[bytes] = []
        previous_name = ""
        # A metric of several namespaces consists of several consecutive parts with the same name, one for each
        # namespace.
        for part in self._metrics.parts():
            block = write(_SingleMetric(part)).removesuffix(OPENMETRICS_EOF)
            is_continued = part.name == previous_name
            blocks.append(_without_header(block) if is_continued else block)
            previous_name = part.name
            await self._cache.budget.spend(METRIC_WORK + SAMPLE_WORK * len(part.samples))
        return b"".join(blocks)


class _SingleMetric(Collector):
    """A collector of one metric: prometheus_client has no function that writes a metric without a collector."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


def _without_header(block: bytes) -> bytes:
    """Remove the HELP and TYPE lines of a metric, which it may have only before the samples of its first namespace."""
    return b"".join(line for line in block.splitlines(keepends=True) if not line.startswith(b"#"))


# -- The status page, at `/`: static files, with scripts that call the API --------

INDEX = "index.html"
CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Content types by file extension."""


class PageFiles:
    """Serves the files of the folder `page` at `/NAME`, and `index.html` at `/`.

    The files are read once, at the start.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, bytes]] = {}
        """Content type and content of each file, by URL path."""
        for file in files(__package__).joinpath("page").iterdir():
            path = "/" if file.name == INDEX else f"/{file.name}"
            extension = file.name.rpartition(".")[2]
            self._files[path] = CONTENT_TYPES[extension], file.read_bytes()

    def routes(self) -> Iterable[web.RouteDef]:
        """Return a route for each file."""
        return [web.get(path, self.file) for path in sorted(self._files)]

    async def file(self, request: web.Request) -> web.Response:
        """Respond with a file, or with 304 if the ETag in the request shows that the browser has the current version."""
        content_type, body = self._files[request.path]
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": etag}
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)
