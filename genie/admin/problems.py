"""What is answered to a question that can't be: always JSON, with what is wrong and what would be right."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import web
from msgspec import UNSET

from genie.admin import answers, encoding
from genie.errors import Code

log = structlog.get_logger()

MAX_BODY: Final = 4096
"""Bytes that a client may send."""
JSON: Final = "application/json"


class Problem(Exception):
    """Ends a request with this status; `leader` is the address of the server that would know."""

    def __init__(self, status: int, code: str, message: str, leader: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answers.Problem(code=code, message=message, leader=UNSET if leader is None else leader)


def bad(message: str) -> Problem:
    """A question that is wrong in itself."""
    return Problem(400, Code.BAD_REQUEST, message)


@web.middleware
async def as_answers(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer whatever goes wrong."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except Problem as caught:
        problem = caught
        if problem.status == web.HTTPServiceUnavailable.status_code:
            headers["Retry-After"] = "1"
    except web.HTTPNotFound:
        problem = Problem(404, "not-found", f"nothing is at {request.path[:200]}; /api/schema says what is where")
    except web.HTTPMethodNotAllowed as wrong:
        allowed = ", ".join(sorted(wrong.allowed_methods))
        headers["Allow"] = allowed
        problem = Problem(405, "not-allowed", f"{request.path[:200]} takes {allowed}, not {request.method}")
    except web.HTTPRequestEntityTooLarge:
        problem = Problem(413, Code.BAD_REQUEST, f"a body has at most {MAX_BODY} bytes")
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        log.exception("a defect in the admin port", path=request.path[:200])
        problem = Problem(500, "defect", "this is a defect of the server; its log says more")
    return web.Response(
        status=problem.status, body=encoding.at_once(problem.answer), content_type=JSON, headers=headers
    )
