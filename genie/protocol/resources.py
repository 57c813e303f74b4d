"""Locks on the wire: `shared:NAME`, `exclusive:NAME`, and `2/10:NAME` for 2 of at most 10 units.

In arguments of programs, `NAME` alone is an exclusive lock. The name `**` means all names, and `accounts/**` all names
that begin with `accounts/`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from genie.lock_modes import MAX_SUBTREE_LEVELS, WHOLE_NAMESPACE, QueueMode, S, U, UnitCount, X, is_subtree, lock_text

MAX_NAME = 512
"""Maximum characters of the name of a resource or a transaction."""
MAX_RESOURCES = 1024
"""Maximum resources of one request."""

MAX_CHOICES = 10_000
"""Maximum resources that one request can choose from."""
MAX_UNIT_CHOICES = 2_500
"""Maximum resources of which one request with `anyOf` can ask for units: each takes as much work as four others."""

SHARED = "shared:"
EXCLUSIVE = "exclusive:"
_SHARED_LENGTH = len(SHARED)
_EXCLUSIVE_LENGTH = len(EXCLUSIVE)

MAX_UNITS = 1_000_000
"""Maximum number of units of a resource that may be in use at once."""

MAX_SUBTREES = 16
"""Maximum number of subtrees in one request. Each subtree that is not locked yet is compared with all locked names."""

_UNITS = re.compile(r"([0-9]{1,7})/([0-9]{1,7}):")
_UNIT_COUNT = re.compile(r"([0-9]{1,7})/([0-9]{1,7})")

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROL_BYTES = bytes((*range(0x20), *range(0x7F, 0xA0)))
_MODES = {"exclusive": X, "shared": S}


def check_name(name: str, what: str = "a name") -> str:
    """Return `name` if it is a valid name. Otherwise raise ValueError with a message that begins with `what`."""
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{what} must have 1 to {MAX_NAME} characters, not {len(name)}")
    if not name.isprintable() and CONTROL_CHARACTERS.search(name):
        raise ValueError(f"{what} must not contain control characters")
    return name


def parse_resource(resource: str) -> tuple[QueueMode, str, UnitCount | None]:
    """Split a resource such as `exclusive:NAME` into its mode (`S`, `X` or `U`), its name, and its units if the mode is `U`.

    Raises ValueError if the mode or the name is invalid.
    """
    if resource.startswith(EXCLUSIVE):
        return X, check_name(resource[_EXCLUSIVE_LENGTH:], "the name of a resource"), None
    if resource.startswith(SHARED):
        return S, check_name(resource[_SHARED_LENGTH:], "the name of a resource"), None
    found = _UNITS.match(resource)
    if found is not None:
        name = check_name(resource[found.end() :], "the name of a resource")
        return U, *_check_units(name, units=int(found[1]), limit=int(found[2]))
    mode = resource.partition(":")[0][:40]
    raise ValueError(f"a resource must begin with 'shared:', 'exclusive:' or units such as '2/10:', not {mode!r}")


def _check_units(name: str, units: int, limit: int) -> tuple[str, UnitCount]:
    """Return `name` and `(units, limit)`, the units of a counted lock. Raises ValueError if they are invalid."""
    if not 1 <= units <= limit <= MAX_UNITS:
        raise ValueError(f"units must be K/N with 1 <= K <= N <= {MAX_UNITS}, not {units}/{limit}")
    if is_subtree(name):
        raise ValueError(f"units of a subtree do not exist: {name[:64]!r} means all names below it")
    return name, (units, limit)


Names = tuple[tuple[str, ...], tuple[str, ...], dict[str, UnitCount] | None]
"""The names in shared mode, the names in exclusive mode, and the units by name (None if there are no units)."""


def split_by_mode(resources: Sequence[str]) -> Names:
    """Return the names of a request by mode.

    A name in shared and in exclusive mode is exclusive. The units of a repeated name are added up. Raises ValueError if
    a resource is invalid, if a name has several limits, or if it has units and another mode.
    """
    if not 0 < len(resources) <= MAX_RESOURCES:
        raise ValueError(f"resources must be a list of 1 to {MAX_RESOURCES} entries, not {len(resources)}")
    modes: dict[str, QueueMode] = {}
    units: dict[str, UnitCount] = {}
    for resource in resources:
        mode, name, asked = parse_resource(resource)
        if asked is not None:
            units[name] = asked if name not in units else _add_units(name, units[name], asked)
        else:
            modes[name] = mode or modes.get(name, S)  # `S` is 0, so an earlier mode is kept
    if units:
        for name in units.keys() & modes.keys():
            raise ValueError(f"{name[:64]!r} is requested as units and in another mode: use one of them")
    return (
        tuple(name for name, mode in modes.items() if mode == S),
        tuple(name for name, mode in modes.items() if mode == X),
        units or None,
    )


def split_checked(resources: Sequence[str]) -> Names:
    """Return the names of a request by mode, like `split_by_mode`, and check its subtrees.

    Also raises ValueError for too many subtrees, and for a subtree with too many levels. `split_by_mode`, which runs
    for every request, omits these checks, because few requests name subtrees.
    """
    names = in_shared_mode, in_exclusive_mode, _ = split_by_mode(resources)
    subtrees = [name for name in (*in_shared_mode, *in_exclusive_mode) if is_subtree(name)]
    if len(subtrees) > MAX_SUBTREES:
        raise ValueError(f"a request must name at most {MAX_SUBTREES} subtrees, not {len(subtrees)}")
    for name in subtrees:
        _check_levels(name)
    return names


def _check_levels(subtree: str) -> None:
    """Raise ValueError if a subtree has too many levels, that is, slashes."""
    if subtree.count("/") > MAX_SUBTREE_LEVELS:
        raise ValueError(
            f"a subtree must have at most {MAX_SUBTREE_LEVELS} slashes, not {subtree.count('/')}: {subtree[:64]!r}"
        )


def _add_units(name: str, units: UnitCount, others: UnitCount) -> UnitCount:
    """Return the sum of units of one name. Raises ValueError if their limits differ, or the sum exceeds the limit."""
    (count, limit), (other_count, other_limit) = units, others
    if limit != other_limit:
        raise ValueError(f"{name[:64]!r} is requested with limits of {limit} and {other_limit} units: use one limit")
    total = count + other_count
    if total > limit:
        raise ValueError(f"{total} units of {name[:64]!r} are requested in total, but at most {limit} may be in use")
    return total, limit


Choices = tuple[tuple[tuple[str, QueueMode], ...], dict[str, UnitCount]]
"""The choices of `anyOf` in order, as pairs of name and mode, and the units of the choices in the mode `U`."""


def parse_choices(resources: Sequence[str]) -> Choices:
    """Return the choices of `anyOf`.

    Raises ValueError if a resource is invalid or a subtree, or if a name occurs twice.
    """
    if not 0 < len(resources) <= MAX_CHOICES:
        raise ValueError(f"anyOf must be a list of 1 to {MAX_CHOICES} entries, not {len(resources)}")
    # Inline, because ten thousand calls of `parse_resource` take 20 ms, or 40 ms for units.
    modes: dict[str, QueueMode] = {}
    units: dict[str, UnitCount] = {}
    for resource in resources:
        text, _, name = resource.partition(":")
        mode = _MODES.get(text)
        if mode is None or not 0 < len(name) <= MAX_NAME:
            mode, name, asked = _parse_units(text, name) or parse_resource(resource)
            if asked is not None:
                units[name] = asked
        modes[name] = mode
    if len(units) > MAX_UNIT_CHOICES:
        raise ValueError(f"anyOf must ask for units of at most {MAX_UNIT_CHOICES} resources, not {len(units)}")
    # All names are checked together, which is fast. Control characters are in latin-1, and other characters are
    # dropped.
    latin = "".join(modes).encode("latin-1", "ignore")
    if len(latin.translate(None, _CONTROL_BYTES)) < len(latin):
        for name in modes:
            check_name(name, "the name of a resource")
    if len(modes) < len(resources):
        counts = Counter(resource.partition(":")[2] for resource in resources)
        most_frequent = max(counts, key=counts.__getitem__)
        raise ValueError(f"anyOf must name each resource once, but names {most_frequent[:64]!r} twice")
    if subtrees := [name for name in modes if name[-2:] == "**" and is_subtree(name)]:
        raise ValueError(f"anyOf must not name a subtree, such as {subtrees[0][:64]!r}: use resources")
    return tuple(modes.items()), units


def _parse_units(text: str, name: str) -> tuple[QueueMode, str, UnitCount] | None:
    """Return the mode, the name and the units of a counted lock whose units are `text`, such as `2/10`.

    A fast path of `parse_resource`. Returns None if something may be invalid: `parse_resource` then finds the error.
    """
    found = _UNIT_COUNT.fullmatch(text)
    if found is None or not 0 < len(name) <= MAX_NAME or name[-2:] == "**":
        return None
    count, limit = map(int, found.groups())
    return (U, name, (count, limit)) if 1 <= count <= limit <= MAX_UNITS else None


def shared(name: str) -> str:
    """Return the wire form of a shared lock on any name, even one with colons. Raises ValueError if the name is invalid."""
    return SHARED + check_name(name, "the name of a resource")


def exclusive(name: str) -> str:
    """Return the wire form of an exclusive lock on any name, even one with colons. Raises ValueError if the name is invalid."""
    return EXCLUSIVE + check_name(name, "the name of a resource")


def units(name: str, count: int, of: int) -> str:
    """Return the wire form of a lock on `count` units of a resource, of which at most `of` are in use at once: `2/10:NAME`.

    The limit `of` is not declared anywhere else: a request is granted if all units in use and its own are at most `of`.

    Raises:
        ValueError: if not 1 <= count <= of <= 1,000,000, or if the name is invalid or a subtree.

    """
    _check_units(check_name(name, "the name of a resource"), count, of)
    return f"{count}/{of}:{name}"


def subtree(name: str, *, shared: bool = False) -> str:
    """Return the wire form of a lock on all names that begin with `name`, existing and future ones: `exclusive:accounts/**`.

    `name` ends with `/`; an empty `name` means the whole namespace. The lock is exclusive, or shared if `shared` is true.
    `accounts` itself is not below `accounts/`.

    Raises:
        ValueError: if the name is invalid, does not end with `/`, or has more than 16 slashes.

    """
    if name and not name.endswith("/"):
        raise ValueError(f"a subtree must end with '/', or be '' for all names, not {name[-64:]!r}")
    _check_levels(name)
    return (SHARED if shared else EXCLUSIVE) + check_name(name + WHOLE_NAMESPACE, "the name of a resource")


def merge(resources: Iterable[str]) -> dict[str, str]:
    """Merge resources of the same name. Return the merged resource of each name, in the order of the first occurrences.

    A merged resource locks as much as all resources of its name together. Units are added up. A name in different modes
    becomes exclusive.
    """
    merged: dict[str, tuple[QueueMode, UnitCount | None]] = {}
    for resource in resources:
        mode, name, asked = parse_resource(resource)
        other_mode, others = merged.get(name, (mode, None))
        if mode != other_mode:
            mode, asked = X, None
        elif asked is not None and others is not None:
            (count, limit), (other_count, other_limit) = asked, others
            merged_limit = min(limit, other_limit)
            asked = min(count + other_count, merged_limit), merged_limit
        merged[name] = mode, asked
    return {name: lock_text(name, mode, asked) for name, (mode, asked) in merged.items()}


def strongest(one: str, other: str) -> str:
    """Return a resource that locks at least as much as each of two resources of the same name.

    Units are not added up.
    """
    mode, name, units = parse_resource(one)
    other_mode, _, others = parse_resource(other)
    if mode != other_mode:
        return exclusive(name)
    return one if units is None or others is None else lock_text(name, U, max(units, others))


def parse_resource_arg(resource: str) -> str:
    """Return the wire form of an argument: `shared:NAME`, `exclusive:NAME`, `2/10:NAME`, or `NAME` for exclusive.

    Raises ValueError if the argument is invalid. A name without a mode must not contain a colon, so
    that a mistyped mode is not mistaken for a part of the name.
    """
    if ":" not in resource:
        return exclusive(resource)
    if resource.startswith((SHARED, EXCLUSIVE)) or _UNITS.match(resource):
        parse_resource(resource)
        return resource
    mode, _, name = resource.partition(":")
    raise ValueError(
        f"{resource!r}: a resource is shared:NAME, exclusive:NAME, 2/10:NAME or a NAME without a colon; "
        f"{mode!r} is not a mode (for a name with a colon write exclusive:{mode}:{name})"
    )
