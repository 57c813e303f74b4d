"""The page for people, at `/`: plain files that ask the API, and nobody else, what to show."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.resources import files

from aiohttp import web

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
