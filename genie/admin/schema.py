"""`/api/schema`: what is asked and answered where, in OpenAPI's words, made from the types of the answers."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec

from genie.admin import answers
from genie.admin.parameters import LIMITS
from genie.protocol.fields import MAX_NAMESPACE
from genie.protocol.resources import MAX_NAME

ANSWERS: dict[str, type[answers.Answer]] = {
    "/api/state": answers.State,
    "/api/waits": answers.Waits,
    "/api/hot": answers.HotList,
    "/api/deadlocks": answers.Deadlocks,
    "/api/resources/{name}": answers.Resource,
    "/api/release": answers.Released,
}
_TEMPLATE = "#/components/schemas/{name}"


def schema() -> bytes:
    """The whole, as JSON."""
    kinds = [*ANSWERS.values(), answers.Release, answers.Problem]
    refs, components = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)
    ref = dict(zip(kinds, refs, strict=True))
    problem = {"description": "Why not, and what would be right", **_body(ref[answers.Problem])}
    paths: dict[str, Any] = {}
    for path, kind in ANSWERS.items():
        asked: dict[str, Any] = {
            "parameters": _parameters(path),
            "responses": {"200": {"description": _first_line(kind), **_body(ref[kind])}, "default": problem},
        }
        if path == "/api/release":
            asked["requestBody"] = {"required": True, **_body(ref[answers.Release])}
            paths[path] = {"post": asked}
        else:
            paths[path] = {"get": asked}
    info = {"title": "Genie's admin port", "version": version("genie-lock")}
    return msgspec.json.encode(
        {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    )


def _body(ref: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": ref}}}


def _first_line(kind: type[answers.Answer]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _parameters(path: str) -> list[dict[str, Any]]:
    bounds = {"type": "string", "minLength": 1, "maxLength": MAX_NAMESPACE}
    what = "which namespace; that of who says none is the server's first"
    return [*_own(path), {"name": "namespace", "in": "query", "description": what, "schema": bounds}]


def _own(path: str) -> list[dict[str, Any]]:
    if path in LIMITS:
        known = LIMITS[path]
        bounds = {"type": "integer", "minimum": 1, "maximum": known.most, "default": known.usual}
        return [{"name": "limit", "in": "query", "description": f"{known.what} at most", "schema": bounds}]
    if "{name}" in path:
        bounds = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
        return [{"name": "name", "in": "path", "required": True, "schema": bounds}]
    return []
