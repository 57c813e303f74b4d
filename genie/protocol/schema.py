"""The JSON Schema of all commands and messages, generated from the types that decode them.

`python -m genie.protocol.schema` writes `schema.json` beside this file.
"""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import Any, Final

import msgspec

from genie.protocol import limits, messages, wire_types

PATH: Final = Path(__file__).with_name("schema.json")

_ERROR = """`ref` is the `ref` of the command, if it had one. `id` occurs only in errors of a `release` or `extend` with an `id`. \
`leader` occurs only with the code `unavailable`, `supported` only with `unsupported-protocol`."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema: `$defs/command` describes a line of a client, `$defs/message` a line of a server."""
    (command, message, rows), components = msgspec.json.schema_components(
        [wire_types.Line, messages.Message, messages.InspectedRows], ref_template="#/$defs/{name}"
    )
    definitions: dict[str, Any] = _renamed({"command": command, "message": message, **components})
    definitions["RequestPayload"]["oneOf"] = [
        _needs("resources", without=("anyOf", "weights", "target")),
        _needs("anyOf", "target", without=("resources",)),
    ]
    definitions["ReleasePayload"]["anyOf"] = [_needs("id"), _needs("ref")]
    definitions["Inspected"]["properties"]["payload"] = rows
    definitions["ErrorPayload"]["description"] = _ERROR
    for definition in definitions.values():
        if "description" in definition:  # a docstring, which msgspec before version 0.23 leaves indented
            definition["description"] = cleandoc(definition["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Genie wire protocol {limits.PROTOCOL}",
        "description": "One JSON object per line. A null field counts as left out. protocol.md is the reference.",
        "anyOf": [{"$ref": "#/$defs/command"}, {"$ref": "#/$defs/message"}],
        "$defs": definitions,
    }


def _renamed(definitions: dict[str, Any]) -> dict[str, Any]:
    """Rename the payload classes: a qualified Python name such as `Welcome.Payload` becomes `WelcomePayload`."""
    encoded = msgspec.json.encode(definitions).replace(f"{messages.__name__}.".encode(), b"")
    renamed: dict[str, Any] = msgspec.json.decode(encoded.replace(b".Payload", b"Payload"))
    return renamed


def _needs(*names: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the schema of a payload with all fields of `names` and none of `without`. Null counts as omitted."""
    has = {name: {"not": {"type": "null"}} for name in names}
    lacks = {name: {"type": "null"} for name in without}
    return {"required": list(names), "properties": {**has, **lacks}}


def text() -> bytes:
    """Return the schema as formatted JSON: the content of `schema.json`."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2) + b"\n"


if __name__ == "__main__":
    PATH.write_bytes(text())
