"""`/metrics`, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from prometheus_client import exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as open_exposition
from prometheus_client.registry import Collector

from genie.admin.encoding import Body
from genie.admin.turns import Turns
from genie.observability.metrics import Metrics, Source

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
