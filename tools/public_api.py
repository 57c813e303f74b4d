"""Lists the public API of Genie: names and signatures of the Python packages, and the fields of the messages on the wire.

`make public-api` writes the lists: that of the lock server to tests/baselines/public_api.txt, that of each application to
its tests. The tests compare them with the code.
docs/reference/public-api.md says what a change of the list means for a version.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, ForwardRef

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "tests/baselines/public_api.txt": (
        "genie",
        "genie.sync",
        "genie.sql",
        "genie.otel",
        "genie.testing",
        "genie.pytest_plugin",
        "genie.backoff",
        "genie.tasks",
        "genie.sql.engine",
        "genie.sql.schema_check",
        "genie.sql.sqlite",
        "genie.cli.toolkit",
    ),
    "applications/ledger/tests/public_api.txt": ("genie_ledger",),
    "applications/tokens/tests/public_api.txt": ("genie_tokens", "genie_tokens.sync"),
}
"""The public modules, by the file with their list. The applications may import no other module of `genie`."""
WIRE = "tests/baselines/public_api.txt"
"""The list that also has the fields on the wire."""
MADE_BY_OTHER_CALLS = ("Client", "Lock", "LockContext", "Selection")
"""Classes whose constructors are internal, for example because `connect` calls them."""
HEADER = "# Written by `make public-api`. A changed or removed line breaks users: docs/reference/public-api.md.\n"


def listing(path: str) -> str:
    """Return the whole list of a file, one name or field a line."""
    lines = [line for package in PACKAGES[path] for line in package_lines(import_module(package))]
    if path == WIRE:
        schema = json.loads((ROOT / "genie/protocol/schema.json").read_text())
        lines += wire_lines(schema["$defs"])
    return HEADER + "\n".join(lines) + "\n"


def package_lines(package: types.ModuleType) -> Iterator[str]:
    """Return the lines of the names in `__all__` of a package."""
    for name in sorted(package.__all__):
        yield from _object_lines(f"{package.__name__}.{name}", getattr(package, name))


def wire_lines(definitions: dict[str, Any]) -> Iterator[str]:
    """Return a line for each field of each JSON object of the wire: its type, and whether it is required."""
    for name, definition in sorted(definitions.items()):
        for field, schema in sorted(definition.get("properties", {}).items()):
            required = "" if field in definition.get("required", ()) else "?"
            yield f"wire {name}.{field}{required}: {_wire_type(schema)}"
        alternatives = definition.get("anyOf", [])
        if alternatives:
            yield f"wire {name}: {_wire_type({'anyOf': alternatives})}"


def _object_lines(name: str, value: object) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield f"module {name}"
    elif isinstance(value, type):
        yield from _class_lines(name, value)
    elif package_of(name) == "genie.pytest_plugin":
        yield f"fixture {name}"
    elif inspect.isroutine(value):
        yield f"{_kind(value)} {name}{signature(value)}"
    else:
        yield f"value {name}"


def package_of(name: str) -> str:
    """Return the package of a qualified name."""
    return name.rpartition(".")[0]


def _class_lines(name: str, cls: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {name}({bases})"
    if issubclass(cls, Enum):
        yield from (f"  value {name}.{member.name}" for member in cls)
        return
    annotations: dict[str, str] = {}
    members: dict[str, object] = {}
    for owner in reversed([one for one in cls.__mro__ if one.__module__.startswith("genie")]):
        annotations |= {key: _annotation(value) for key, value in inspect.get_annotations(owner).items()}
        members |= vars(owner)
    if "__init__" in members and cls.__name__ not in MADE_BY_OTHER_CALLS and not getattr(cls, "_is_protocol", False):
        yield f"  def {name}.__init__{signature(members['__init__'])}"
    for field, annotation in sorted(annotations.items()):
        if not field.startswith("_"):
            yield f"  field {name}.{field}: {annotation}"
    for key, value in sorted(members.items()):
        if key.startswith("_") or key in annotations:
            continue
        if isinstance(value, property):
            result = _annotation(inspect.get_annotations(value.fget).get("return", "")) if value.fget else ""
            yield f"  property {name}.{key}: {result}"
        elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            yield f"  {_kind(function)} {name}.{key}{signature(function)}"


def _kind(function: object) -> str:
    wrapped = inspect.unwrap(function) if callable(function) else function
    return "async def" if inspect.iscoroutinefunction(wrapped) else "def"


def signature(function: Any) -> str:
    """Return the signature in one spelling for all versions of Python. Default values of other classes are elided."""
    found = inspect.signature(function)
    shown, keyword_only = [], False
    for parameter in found.parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.VAR_POSITIONAL:
            keyword_only = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        text = f"{star}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            simple = parameter.default is None or isinstance(parameter.default, (bool, int, float, str, tuple))
            text += f" = {parameter.default!r}" if simple else " = ..."
        shown.append(text)
    result = "" if found.return_annotation is found.empty else f" -> {_annotation(found.return_annotation)}"
    return f"({', '.join(shown)}){result}"


def _annotation(annotation: object) -> str:
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _wire_type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_wire_type(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"[{_wire_type(schema.get('items', {}))}]"
    return str(schema.get("type", "any"))


if __name__ == "__main__":
    for path in PACKAGES:
        (ROOT / path).write_text(listing(path))
        print(path)
