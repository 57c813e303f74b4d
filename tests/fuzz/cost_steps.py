"""Generates and mutates the sequences of steps that `costs` plays: bursts of commands, disconnects and waits.

A step is a dict that can be written as JSON. "do" names a method of `cost_server.CostServer`, the rest are its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

Step = dict[str, Any]

CLIENTS = 5
MAX_STEPS = 12
MAX_BURST_BYTES = 1 << 20
"""Bytes after which a burst ends, so that a sequence takes seconds."""
ALIGNMENT_MS = 5_000
"""Aligned timeouts end at multiples of this time, so that many locks expire together."""

COMMANDS = (
    *("request",) * 8,
    *("release", "release", "releaseByRef", "anyOf", "anyOf", "extend"),
    *("inspect", "watch", "unwatch", "ping", "bye", "invalid", "blank"),
)

SLOW_COMMANDS = ("inspect", "watch")

BURST: dict[str, tuple[Any, ...]] = {
    "command": COMMANDS,
    "count": (1, 1, 2, 10, 50, 200, 1000, 1000, 3000),
    "first": (0, 0, 1, 10, 100, 1000),
    "stride": (0, 0, 1, 1, -1, 2, 50),
    "width": (1, 1, 1, 2, 2, 5, 50, 1024),
    "names": (1, 2, 10, 100, 100_000, 100_000),
    "mode": ("exclusive", "exclusive", "shared", "mixed", "first"),
    "transaction": (None, None, "one", "each", "few", "client"),
    "priority": (None, None, None, "up", "down"),
    "queue": (None, 0, 50, 20_000, 20_000),
    "timeout": (None, None, 100, 20_000, "aligned"),
    "ref": (False, False, True),
    "note": (0, 0, 250),
    "name": ("short", "short", "short", "fat", "below", "deep"),
    "units": (None, None, None, "1/1", "1/32", "1/1000000", "mixed"),
    "subtree": (None, None, None, None, "whole", "above", "above"),
    "disconnect": (None, "release", "release", "keep"),
    "trace": (False, False, True),
}
"""The arguments of a burst. `first`, `stride` and `width` number the resources of each request, modulo `names`.

Names have 0, 1 or 240 subtrees above them other than `**`. With `subtree`, a request is for these subtrees; with `units`, for
units of the names.
"""

NAMES = {"short": "", "fat": "/" + "x" * 480, "below": "/x", "deep": "/d" * 240}
"""What follows in a name after its number."""

OTHERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "hello": {"session": (0, 1, 2), "lasts": (50, 10_000), "quiet": (False, True)},
    "drop": {},
    "half_close": {},
    "stall": {},
    "drain": {},
    "wait": {"ms": (1, 60, 200, 5_000, 11_000)},
    "storm": {"count": (2, 20, 200), "session": (None, 0, 1), "request": (False, True)},
}
"""The other steps, with their arguments."""


def make_step(random: Random) -> Step:
    """Return a random step."""
    step: Step = {"do": "send" if random.random() < 0.7 else random.choice(list(OTHERS))}
    step["client"] = random.randrange(CLIENTS)
    step["settle"] = random.random() < 0.8
    return step | {name: random.choice(values) for name, values in _space(step).items()}


def _space(step: Step) -> dict[str, tuple[Any, ...]]:
    return BURST if step["do"] == "send" else OTHERS[step["do"]]


def make_sequence(random: Random) -> list[Step]:
    """Return a random sequence."""
    return [make_step(random) for _ in range(random.randrange(2, MAX_STEPS))]


def mutate(random: Random, steps: list[Step], other: list[Step]) -> list[Step]:
    """Return a changed copy of a sequence. `other` is a sequence from which steps may be taken."""
    changed = [dict(step) for step in steps]
    for _ in range(random.choice((1, 1, 2, 4))):
        at, chance = random.randrange(len(changed)), random.random()
        if chance < 0.55:
            _mutate_step(random, changed[at])
        elif chance < 0.65:
            changed.insert(at, dict(changed[random.randrange(len(changed))]))
        elif chance < 0.75 and len(changed) > 1:
            del changed[at]
        elif chance < 0.85:
            changed.insert(at, make_step(random))
        elif chance < 0.93:
            changed[at:] = [dict(step) for step in other[random.randrange(len(other)) :]]
        else:
            random.shuffle(changed)
    return changed[-MAX_STEPS:]


def _mutate_step(random: Random, step: Step) -> None:
    space = _space(step)
    name = random.choice([*space, "client", "settle"])
    if name == "client":
        step["client"] = random.randrange(CLIENTS)
    elif name == "settle":
        step["settle"] = not step["settle"]
    elif name in ("count", "width") and random.random() < 0.7:
        step[name] = max(1, min(BURST[name][-1], int(step[name] * random.choice((0.5, 0.9, 1.5, 2, 4)))))
    else:
        step[name] = random.choice(space[name])


# -- The lines of a burst -----------------------------------------------------------------------------------


def lines(step: Step, next_id: int, now_ms: float) -> Iterator[bytes]:
    """Yield the lines of a burst. `next_id` is the id of the next request, which the ids of releases precede."""
    sent_bytes = 0
    for i in range(step["count"]):
        line = _line(step, i, next_id, now_ms) + b"\n"
        sent_bytes += len(line)
        if sent_bytes > MAX_BURST_BYTES and i:
            return
        yield line
        if step["command"] in SLOW_COMMANDS and i >= 50:
            return  # each of them has an iteration of its own


def _line(step: Step, i: int, next_id: int, now_ms: float) -> bytes:
    command = step["command"]
    if command == "blank":
        return b""
    if command == "invalid":
        return b'{"command":"request","payload":{"resources":[' + b"[" * min(step["width"], 900) + b"1]}}"
    payload: dict[str, Any] = {}
    if command in ("request", "anyOf"):
        payload = _request(step, i, now_ms)
    elif command in ("release", "extend"):
        payload["id"] = max(1, next_id - 1 - step["first"] - i * abs(step["stride"] or 1))
        if command == "extend":
            payload["transactionTimeout"] = _timeout(step, now_ms) or 20_000
    elif command == "releaseByRef":
        command, payload["ref"] = "release", f"{step['client']}/{step['first'] + i}"
    elif command in ("watch", "unwatch"):
        payload["prefix"] = "" if step["mode"] == "shared" else _name(step, step["first"] + i)
    elif command == "inspect":
        payload["limit"] = min(1_000, max(1, step["first"]))
        if step["mode"] == "first":
            payload["resource"] = _name(step, step["first"] + i)
        elif step["transaction"]:
            payload["transactionName"] = _transaction(step, i)
    return json.dumps({"command": command if command != "anyOf" else "request", "payload": payload}).encode()


def _request(step: Step, i: int, now_ms: float) -> dict[str, Any]:
    any_of = step["command"] == "anyOf"
    # No more than there are names: this work would count as work of the server if time is measured.
    width = min(step["width"] * (8 if any_of else 1), step["names"])
    names = [_name(step, step["first"] + i * step["stride"] + each) for each in range(width)]
    modes = {"exclusive": ("exclusive", "exclusive"), "shared": ("shared", "shared"), "mixed": ("exclusive", "shared")}
    first, rest = modes.get(step["mode"], ("shared", "exclusive"))
    if step["units"] is not None and (any_of or not step["subtree"]):
        resources = [f"{_units(step, i + at)}:{name}" for at, name in enumerate(names)]
    elif step["mode"] == "mixed":
        resources = [f"{(first, rest)[(i + at) % 2]}:{name}" for at, name in enumerate(names)]
    else:
        resources = [f"{first if not i else rest}:{name}" for name in names]
    optional = {
        "transactionName": _transaction(step, i),
        "priority": {"up": i, "down": -i}.get(step["priority"]),
        "queueTimeout": step["queue"],
        "transactionTimeout": _timeout(step, now_ms),
        "ref": f"{step['client']}/{step['first'] + i}" if step["ref"] else None,
        "note": "n" * step["note"] or None,
        "onDisconnect": step["disconnect"],
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01" if step["trace"] else None,
        "target": 1 if any_of else None,
    }
    return {"anyOf" if any_of else "resources": resources} | {
        name: value for name, value in optional.items() if value is not None
    }


def _name(step: Step, number: int) -> str:
    """Return a name, or a subtree above it: with `deep` another one of the 240 each time, and at least `rN/**`."""
    if step["subtree"] == "whole" and step["command"] != "anyOf":
        return "**"
    name = f"r{number % step['names']}{NAMES[step['name']]}"
    if step["subtree"] is None or step["command"] == "anyOf":
        return name
    parts = name.split("/")
    return "/".join([*parts[: 1 + number % max(1, len(parts) - 1)], "**"])


def _units(step: Step, number: int) -> str:
    return f"{1 + number % 3}/{3 + number % 5}" if step["units"] == "mixed" else str(step["units"])


def _transaction(step: Step, i: int) -> str | None:
    names = {"one": "T", "each": f"T{step['first'] + i}", "few": f"T{i % 10}", "client": f"T{step['client']}"}
    return names.get(step["transaction"])


def _timeout(step: Step, now_ms: float) -> float | None:
    if step["timeout"] == "aligned":
        return max(1, int(ALIGNMENT_MS - now_ms % ALIGNMENT_MS))
    timeout: float | None = step["timeout"]
    return timeout
