"""Resource names: `shared:NAME` and `exclusive:NAME` on the wire; `NAME` alone is allowed in arguments of programs."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_NAME = 512
"""Maximum characters of the name of a resource or a transaction."""
MAX_RESOURCES = 1024
"""Maximum resources of one request."""

MAX_CHOICES = 10_000
"""Maximum resources that one request can choose from."""

SHARED = "shared:"
EXCLUSIVE = "exclusive:"
_SHARED_LENGTH = len(SHARED)
_EXCLUSIVE_LENGTH = len(EXCLUSIVE)

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROL_BYTES = bytes((*range(0x20), *range(0x7F, 0xA0)))
_IS_EXCLUSIVE = {"exclusive": True, "shared": False}


def check_name(name: str, what: str = "a name") -> str:
    """Return `name` if it is a valid name. Otherwise raise ValueError with a message that begins with `what`."""
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{what} must have 1 to {MAX_NAME} characters, not {len(name)}")
    if not name.isprintable() and CONTROL_CHARACTERS.search(name):
        raise ValueError(f"{what} must not contain control characters")
    return name


def parse_resource(resource: str) -> tuple[bool, str]:
    """Split a resource such as `exclusive:NAME`. Return whether the mode is exclusive, and the name.

    Raises ValueError if the mode or the name is invalid.
    """
    if resource.startswith(EXCLUSIVE):
        return True, check_name(resource[_EXCLUSIVE_LENGTH:], "the name of a resource")
    if resource.startswith(SHARED):
        return False, check_name(resource[_SHARED_LENGTH:], "the name of a resource")
    mode = resource.partition(":")[0][:40]
    raise ValueError(f"a resource must begin with 'shared:' or 'exclusive:', not {mode!r}")


def split_by_mode(resources: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that are requested in shared mode, and the names requested in exclusive mode.

    A name requested in both modes is exclusive. Raises ValueError if a resource is invalid.
    """
    if not 0 < len(resources) <= MAX_RESOURCES:
        raise ValueError(f"resources must be a list of 1 to {MAX_RESOURCES} entries, not {len(resources)}")
    modes: dict[str, bool] = {}
    for resource in resources:
        exclusive, name = parse_resource(resource)
        modes[name] = exclusive or modes.get(name, False)
    return (
        tuple(name for name, exclusive in modes.items() if not exclusive),
        tuple(name for name, exclusive in modes.items() if exclusive),
    )


def parse_choices(resources: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """Return the choices of `anyOf` in order: pairs of a name and whether it is requested in exclusive mode.

    Raises ValueError if a resource is invalid, or if a name occurs twice.
    """
    if not 0 < len(resources) <= MAX_CHOICES:
        raise ValueError(f"anyOf must be a list of 1 to {MAX_CHOICES} entries, not {len(resources)}")
    # Ten thousand calls of `parse_resource` take 20 ms.
    modes: dict[str, bool] = {}
    for resource in resources:
        mode, _, name = resource.partition(":")
        exclusive = _IS_EXCLUSIVE.get(mode)
        if exclusive is None or not 0 < len(name) <= MAX_NAME:
            exclusive, name = parse_resource(resource)  # raises ValueError
        modes[name] = exclusive
    # The names are checked together, in time that does not depend on their characters: all up to U+00FF are kept.
    latin = "".join(modes).encode("latin-1", "ignore")
    if len(latin.translate(None, _CONTROL_BYTES)) < len(latin):
        for name in modes:
            check_name(name, "the name of a resource")
    if len(modes) < len(resources):
        seen: set[str] = set()
        for name in (resource.partition(":")[2] for resource in resources):
            if name in seen:
                raise ValueError(f"anyOf must name each resource once, but names {name[:64]!r} twice")
            seen.add(name)
    return tuple(modes.items())


def shared(name: str) -> str:
    """Return the wire form of a shared lock on any name, even one with colons."""
    return SHARED + check_name(name, "the name of a resource")


def exclusive(name: str) -> str:
    """Return the wire form of an exclusive lock on any name, even one with colons."""
    return EXCLUSIVE + check_name(name, "the name of a resource")


def parse_resource_arg(resource: str) -> str:
    """Return the wire form of an argument: `shared:NAME`, `exclusive:NAME`, or `NAME` for exclusive.

    Raises ValueError if the argument is invalid. A name without a mode must not contain a colon, so
    that a mistyped mode is not mistaken for a part of the name.
    """
    if resource.startswith((SHARED, EXCLUSIVE)):
        parse_resource(resource)
        return resource
    if ":" in resource:
        mode, _, name = resource.partition(":")
        raise ValueError(
            f"{resource!r}: a resource is shared:NAME, exclusive:NAME or a NAME without a colon; "
            f"{mode!r} is not a mode (for a name with a colon write exclusive:{mode}:{name})"
        )
    return exclusive(resource)
