"""What a question says, checked: each thing that is wrong is named, with what would be right."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec
from aiohttp import web

from genie.admin import answers
from genie.admin.problems import Problem, bad
from genie.protocol import fields
from genie.protocol.resources import check_name


@dataclass(frozen=True)
class Limit:
    """`?limit=`: how many of something at most, from 1 to `most`."""

    usual: int
    most: int
    what: str


LIMITS = {
    "/api/waits": Limit(500, 1_000, "nodes"),
    "/api/hot": Limit(20, 100, "resources"),
    "/api/deadlocks": Limit(20, 100, "deadlocks"),
}
"""By path."""
OF_NO_NAMESPACE = frozenset({"/api/schema"})
"""Paths that tell the same of all."""


def limit(request: web.Request) -> int:
    """How many are asked for. That nothing else is asked for than the path has, a limit or not."""
    known = LIMITS.get(request.path)
    has = ["limit"] * (known is not None) + ["namespace"] * (request.path not in OF_NO_NAMESPACE)
    for name in request.query:
        if name not in has:
            why = f"it has {' and '.join(has) or 'none'}"
            raise bad(f"{name[:64]}: {request.path[:64]} has no such parameter; {why}")
    if known is None or "limit" not in request.query:
        return 0 if known is None else known.usual
    values = request.query.getall("limit")
    text = values[0]
    right = len(values) == 1 and text.isascii() and text.isdecimal() and len(text) <= len(str(known.most))
    if not right or not 1 <= int(text) <= known.most:
        raise bad(f"limit must be one number of {known.what}, 1 to {known.most}, not {', '.join(values)[:64]!r}")
    return int(text)


def namespace(request: web.Request, served: Collection[str]) -> str:
    """Which namespace is asked about, of those that are `served`: the first where none is said."""
    if "namespace" not in request.query:
        return next(iter(served))
    values = request.query.getall("namespace")
    wrong = fields.namespace(values[0])
    if len(values) > 1 or wrong is not None:
        raise bad(f"namespace {wrong or 'must be said once'}, not {', '.join(values)[:64]!r}")
    if values[0] not in served:
        why = f"this server does not serve the namespace {values[0]!r}; it serves {', '.join(served)}"
        raise Problem(404, "not-found", why)
    return values[0]


def name(request: web.Request, prefix: str) -> str:
    """The name of a resource, which is the rest of the path: in UTF-8, with %XX for whatever a URL can't have."""
    path = request.raw_path.partition("?")[0]
    try:
        return check_name(unquote(path[len(prefix) :], errors="strict"), "the name of a resource")
    except UnicodeDecodeError:
        raise bad("the name of a resource must be UTF-8 behind its %XX") from None
    except ValueError as wrong:
        raise bad(str(wrong)) from None


async def release(request: web.Request) -> answers.Release:
    """What is to be released."""
    try:
        body = await request.read()
        asked = msgspec.json.decode(body.decode(), type=answers.Release)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise bad(f'the body must be {{"id": N}}, the id of a request: {wrong}') from None
    if not 0 < asked.id < 1 << 63:
        raise bad(f"id must be that of a request, a positive number of at most 63 bits, not {str(asked.id)[:40]}")
    return asked
