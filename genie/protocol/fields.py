"""The fields of every command, said in words: what they must be, and what is wrong with one that is not.

This is the rule. `commands.py` reads a good line by a faster way that accepts nothing that this would refuse; a line
that it doesn't accept comes here, to be explained or, if it only carries fields that nobody knows, to be taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from genie.errors import Code, RequestRejected
from genie.protocol import codec
from genie.protocol.resources import MAX_CHOICES, MAX_NAME, MAX_RESOURCES, check_name, choices, split

MAX_TIMEOUT_MS: Final = 2_147_483_647
MAX_PRIORITY: Final = 2**31
MAX_REF: Final = 128
MIN_SECRET: Final = 16
MAX_SECRET: Final = 128
MAX_TOKEN: Final = 1024
MAX_NAMESPACE: Final = 128
MAX_ID: Final = 2**53 - 1
MAX_WEIGHT: Final = 2**63 - 1
MAX_ROWS: Final = 1_000
MAX_DEPTH: Final = 16
"""Objects and lists within each other. No message needs more than three."""

Check = Callable[[Any], str | None]
"""Says what a value must be where it isn't, else None."""


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> str | None:
        if type(value) in (int, float) and low <= value <= high:
            return None
        return f"must be a number from {low:,} to {high:,}".replace(",", " ")

    return check


def _integer(low: int, high: int) -> Check:
    def check(value: Any) -> str | None:
        return None if type(value) is int and low <= value <= high else f"must be an integer from {low} to {high}"

    return check


def _id(value: Any) -> str | None:
    return None if type(value) is int and abs(value) <= MAX_ID else f"must be an integer of at most {MAX_ID}"


def _name(value: Any) -> str | None:
    if type(value) is not str:
        return "must be a string"
    try:
        check_name(value)
    except ValueError as error:
        return str(error).removeprefix("a name ")
    return None


def _ref(value: Any) -> str | None:
    return (
        None if type(value) is str and 0 < len(value) <= MAX_REF else f"must be a string of 1 to {MAX_REF} characters"
    )


def _secret(value: Any) -> str | None:
    if type(value) is str and MIN_SECRET <= len(value) <= MAX_SECRET:
        return None
    return f"must be a string of {MIN_SECRET} to {MAX_SECRET} characters that nobody can guess"


def _token(value: Any) -> str | None:
    if type(value) is str and 0 < len(value) <= MAX_TOKEN:
        return None
    return f"must be a string of 1 to {MAX_TOKEN} characters"


_NAMESPACE: Final = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_NAMESPACE}}}")


def namespace(value: Any) -> str | None:
    """What a namespace must be where this is none, else None."""
    if type(value) is str and _NAMESPACE.fullmatch(value):
        return None
    return f"must be a string of 1 to {MAX_NAMESPACE} letters, digits or any of _.:-"


def _on_disconnect(value: Any) -> str | None:
    return None if value in ("keep", "release") else 'must be "keep" or "release"'


def _only(value: Any) -> str | None:
    return None if value in ("holders", "queue") else 'must be "holders" or "queue"'


def _resources(value: Any) -> str | None:
    if type(value) is not list or not 0 < len(value) <= MAX_RESOURCES:
        return f'must be a list of 1 to {MAX_RESOURCES} strings like "shared:NAME" or "exclusive:NAME"'
    if not all(type(resource) is str for resource in value):
        return 'must hold only strings like "shared:NAME" or "exclusive:NAME"'
    try:
        split(value)
    except ValueError as error:
        return f"is not right: {error}"
    return None


def _any_of(value: Any) -> str | None:
    if type(value) is not list or not 0 < len(value) <= MAX_CHOICES or not all(type(one) is str for one in value):
        return f'must be a list of 1 to {MAX_CHOICES} strings like "shared:NAME" or "exclusive:NAME"'
    try:
        choices(value)
    except ValueError as error:
        return f"is not right: {error}"
    return None


def _weight(value: Any) -> str | None:
    if type(value) in (int, float) and 0 < value <= MAX_WEIGHT:
        return None
    return f"must be a number above 0, at most {MAX_WEIGHT}"


def _weights(value: Any) -> str | None:
    if type(value) is list and value and all(_weight(weight) is None for weight in value):
        return None
    return f"must be a list of numbers above 0, each at most {MAX_WEIGHT}, one for each of anyOf"


def _prefix(value: Any) -> str | None:
    wrong = None if value == "" else _name(value)
    return wrong and wrong.replace(f"1 to {MAX_NAME}", f"at most {MAX_NAME}")


_timeout = _number(1, MAX_TIMEOUT_MS)

COMMANDS: Final[Mapping[str, Mapping[str, Check]]] = {
    "request": {
        "resources": _resources,
        "anyOf": _any_of,
        "weights": _weights,
        "target": _weight,
        "queueTimeout": _number(0, MAX_TIMEOUT_MS),
        "transactionTimeout": _timeout,
        "transactionName": _name,
        "priority": _number(-MAX_PRIORITY, MAX_PRIORITY),
        "ref": _ref,
        "onDisconnect": _on_disconnect,
        "namespace": namespace,
    },
    "release": {"id": _id, "namespace": namespace},
    "extend": {"id": _id, "transactionTimeout": _timeout, "namespace": namespace},
    "hello": {"session": _secret, "sessionTimeout": _timeout, "token": _token, "namespace": namespace},
    "ping": {},
    "inspect": {
        "resource": _name,
        "id": _id,
        "transactionName": _name,
        "limit": _integer(1, MAX_ROWS),
        "only": _only,
        "namespace": namespace,
    },
    "watch": {"prefix": _prefix, "namespace": namespace},
    "unwatch": {"prefix": _prefix, "namespace": namespace},
}
"""Every command with its fields. A null counts as left out."""

REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "request": (),
    "release": ("id",),
    "extend": ("id", "transactionTimeout"),
    "hello": (),
    "ping": (),
    "inspect": (),
    "watch": ("prefix",),
    "unwatch": ("prefix",),
}

BARE: Final = ("hello", "ping", "inspect")
"""Commands that may come without a payload."""


def read(line: bytes) -> tuple[str, dict[str, Any]]:
    """The command and the fields that it knows of a line, checked; RequestRejected says what is wrong."""
    try:
        message = codec.loads(line)
    except ValueError as error:
        raise RequestRejected(Code.BAD_JSON, f"the line is not strict JSON in UTF-8: {error}") from None
    if _deeper(message, MAX_DEPTH):
        raise RequestRejected(Code.BAD_JSON, f"nested deeper than {MAX_DEPTH}")
    if type(message) is not dict or type(message.get("command")) is not str:
        raise RequestRejected(Code.BAD_MESSAGE, 'a line must be an object: {"command": string, "payload": object}')
    command, payload = message["command"], message.get("payload")
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise RequestRejected(Code.UNKNOWN_COMMAND, f"{command[:64]!r} is no command; there are {known}")
    if payload is None and command in BARE:
        payload = {}
    if type(payload) is not dict:
        raise RequestRejected(Code.BAD_MESSAGE, f"{command}: payload must be an object")
    known_fields = {name: payload[name] for name in COMMANDS[command] if payload.get(name) is not None}
    wrong = _first_wrong(command, known_fields)
    if wrong is not None:
        ref, id_ = payload.get("ref"), payload.get("id")
        raise RequestRejected(
            Code.BAD_REQUEST,
            f"{command}: {wrong}",
            ref=ref if _ref(ref) is None else None,
            id=id_ if _id(id_) is None else None,
        )
    return command, known_fields


def hello_token(line: bytes) -> str | None:
    """The token that a `hello` says, whatever else may be wrong with it; None where it says none, or is none."""
    return _hello_says(line, "token", _token)


def hello_namespace(line: bytes) -> str | None:
    """The same for the namespace that a `hello` is for; empty where it leaves that out."""
    message = _hello(line)
    if message is None:
        return None
    payload = message.get("payload")
    said: str | None = payload.get("namespace") if type(payload) is dict else None
    return "" if said is None else _hello_says(line, "namespace", namespace)


def is_hello(line: bytes) -> bool:
    """Whether this is a `hello`, whatever may be wrong with it."""
    return _hello(line) is not None


def _hello(line: bytes) -> dict[str, Any] | None:
    try:
        message = codec.loads(line)
    except ValueError:
        return None
    return message if type(message) is dict and message.get("command") == "hello" else None


def _hello_says(line: bytes, field: str, check: Check) -> str | None:
    message = _hello(line)
    if message is None or type(message.get("payload")) is not dict:
        return None
    value: str | None = message["payload"].get(field)
    return value if check(value) is None else None


def _first_wrong(command: str, payload: dict[str, Any]) -> str | None:
    for name in REQUIRED[command]:
        if name not in payload:
            return f"{name} is missing: it {COMMANDS[command][name](None)}"
    for name, value in payload.items():
        must = COMMANDS[command][name](value)
        if must is not None:
            return f"{name} {must}"
    return _together_wrong(payload) if command == "request" else None


def _together_wrong(payload: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields of a `request` beside each other: it names resources, or what to choose from."""
    any_of, weights = payload.get("anyOf"), payload.get("weights")
    if any_of is None:
        for name in ("weights", "target"):
            if name in payload:
                return f"{name} goes with anyOf, which is missing"
        return None if "resources" in payload else f"resources is missing: it {_resources(None)}"
    if "resources" in payload:
        return "resources and anyOf exclude each other"
    if "target" not in payload:
        return f"target is missing: with anyOf it {_weight(None)}"
    if weights is not None and len(weights) != len(any_of):
        return f"weights must be as many as anyOf: {len(any_of)}, not {len(weights)}"
    return None


def _deeper(value: object, depth: int) -> bool:
    level: Iterable[object] = [value]
    for _ in range(depth + 1):
        level = [
            inner
            for outer in level
            if type(outer) in (dict, list)
            for inner in (outer.values() if type(outer) is dict else outer)  # type: ignore[attr-defined]
        ]
        if not level:
            return False
    return True
