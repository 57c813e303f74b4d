"""Resources by name: `shared:NAME` and `exclusive:NAME` on the wire, and a NAME alone for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_NAME = 512
"""Characters in the name of a resource or a transaction."""
MAX_RESOURCES = 1024
"""Resources in one request."""

MAX_CHOICES = 10_000
"""Resources that one request can choose from."""

SHARED = "shared:"
EXCLUSIVE = "exclusive:"
_EXCLUSIVE = len(EXCLUSIVE)

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_name(name: str, what: str = "a name") -> str:
    """The name, or a ValueError that says what is wrong with it."""
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{what} must have 1 to {MAX_NAME} characters, not {len(name)}")
    if not name.isprintable() and CONTROL_CHARACTERS.search(name):
        raise ValueError(f"{what} must not contain control characters")
    return name


def parse_resource(resource: str) -> tuple[bool, str]:
    """Whether a wire resource asks for exclusive use, and its name. ValueError says what is wrong."""
    if resource.startswith(EXCLUSIVE):
        return True, check_name(resource[_EXCLUSIVE:], "the name of a resource")
    if resource.startswith(SHARED):
        return False, check_name(resource[7:], "the name of a resource")
    mode = resource.partition(":")[0][:40]
    raise ValueError(f"a resource must begin with 'shared:' or 'exclusive:', not {mode!r}")


def split_by_mode(resources: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that a request asks to share and those it wants for itself; a name in both counts as the latter."""
    if not 0 < len(resources) <= MAX_RESOURCES:
        raise ValueError(f"resources must be a list of 1 to {MAX_RESOURCES}, not of {len(resources)}")
    modes: dict[str, bool] = {}
    for resource in resources:
        exclusive, name = parse_resource(resource)
        modes[name] = exclusive or modes.get(name, False)
    return (
        tuple(name for name, exclusive in modes.items() if not exclusive),
        tuple(name for name, exclusive in modes.items() if exclusive),
    )


def parse_choices(resources: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """The names that a request chooses from, in order, and whether it wants each for itself. None may come twice."""
    if not 0 < len(resources) <= MAX_CHOICES:
        raise ValueError(f"anyOf must be a list of 1 to {MAX_CHOICES}, not of {len(resources)}")
    modes: dict[str, bool] = {}
    for resource in resources:
        exclusive, name = parse_resource(resource)
        if name in modes:
            raise ValueError(f"anyOf must name each resource once, and names {name[:64]!r} twice")
        modes[name] = exclusive
    return tuple(modes.items())


def shared(name: str) -> str:
    """The wire's string for sharing any name, whatever it contains."""
    return SHARED + check_name(name, "the name of a resource")


def exclusive(name: str) -> str:
    """The wire's string for having any name to oneself, whatever it contains."""
    return EXCLUSIVE + check_name(name, "the name of a resource")


def parse_resource_arg(resource: str) -> str:
    """What people write (`shared:NAME`, `exclusive:NAME`, or a NAME without a colon, which is exclusive).

    A colon behind anything else is a ValueError, so that a mistyped mode is not taken for a name.
    """
    if resource.startswith((SHARED, EXCLUSIVE)):
        parse_resource(resource)
        return resource
    if ":" in resource:
        mode, _, name = resource.partition(":")
        raise ValueError(
            f"{resource!r}: a resource is shared:NAME, exclusive:NAME or a NAME without a colon; "
            f"{mode!r} is no mode (for this very name write exclusive:{mode}:{name})"
        )
    return exclusive(resource)
