"""Explains in words what is wrong with a line that the typed decoder of `commands.py` refuses.

One function for each kind of field says what its value must be. Nothing is accepted here: every line that reaches this
module becomes a `RequestRejected` that names the field, and carries the `ref` of the command (and for `release` and
`extend` the `id`) where those are well-formed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from genie.errors import Code, RequestRejected
from genie.protocol import codec
from genie.protocol.resources import CONTROL as _CONTROL
from genie.protocol.resources import MAX_CHOICES, MAX_NAME, MAX_RESOURCES, check_name, choices, split

PROTOCOL: Final = 1
"""The protocol version that this server speaks."""
DEFAULT_TIMEOUT_MS: Final = 10_000.0
MAX_TIMEOUT_MS: Final = 2_147_483_647
MAX_PRIORITY: Final = 2**31
MAX_REF: Final = 128
MAX_NOTE: Final = 256
MAX_CLIENT: Final = 128
MIN_SECRET: Final = 16
MAX_SECRET: Final = 128
MAX_TOKEN: Final = 1024
MAX_NAMESPACE: Final = 128
NAMESPACE_PATTERN: Final = "[A-Za-z0-9_.:-]+"
MAX_ID: Final = 2**53 - 1
MAX_WEIGHT: Final = 2**63 - 1
MAX_DIGITS: Final = 78
"""Digits in a weight or target that is written as a string: enough for 256 bits."""
DECIMAL_PATTERN: Final = "[1-9][0-9]*"
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


_NAMESPACE: Final = re.compile(NAMESPACE_PATTERN)


def namespace(value: Any) -> str | None:
    """What a namespace must be where this is none, else None."""
    if type(value) is str and len(value) <= MAX_NAMESPACE and _NAMESPACE.fullmatch(value):
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


_DECIMAL: Final = re.compile(DECIMAL_PATTERN)
_WEIGHT_IS: Final = f"an integer from 1 to {MAX_WEIGHT}, or one of at most {MAX_DIGITS} digits as a string"


def _is_weight(value: Any) -> bool:
    if type(value) is str:
        return len(value) <= MAX_DIGITS and _DECIMAL.fullmatch(value) is not None
    return type(value) is int and 0 < value <= MAX_WEIGHT


def _weight(value: Any) -> str | None:
    return None if _is_weight(value) else f"must be {_WEIGHT_IS}"


def _weights(value: Any) -> str | None:
    if type(value) is list and value and all(map(_is_weight, value)):
        return None
    return f"must be a list, with {_WEIGHT_IS} for each of anyOf"


def _prefix(value: Any) -> str | None:
    wrong = None if value == "" else _name(value)
    return wrong and wrong.replace(f"1 to {MAX_NAME}", f"at most {MAX_NAME}")


def _text(most: int) -> Check:
    def check(value: Any) -> str | None:
        try:
            _check_text(value, most)
        except ValueError as error:
            return str(error)
        return None

    return check


def _check_text(value: Any, most: int) -> None:
    if type(value) is not str or not 0 < len(value) <= most:
        raise ValueError(f"must be a string of 1 to {most} characters")
    if not value.isprintable() and _CONTROL.search(value):
        raise ValueError("must not contain control characters")


def check_note(note: str) -> None:
    """ValueError where a `note` is none."""
    _check_text(note, MAX_NOTE)


def check_client(client: str) -> None:
    """ValueError where a `client` is none."""
    _check_text(client, MAX_CLIENT)


def _protocol(value: Any) -> str | None:
    return None if type(value) is int else f"must be an integer, the protocol version: {PROTOCOL}"


def _boolean(value: Any) -> str | None:
    return None if type(value) is bool else "must be true or false"


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
        "note": _text(MAX_NOTE),
        "namespace": namespace,
    },
    "release": {"id": _id, "ref": _ref, "namespace": namespace},
    "extend": {"id": _id, "transactionTimeout": _timeout, "ref": _ref, "namespace": namespace},
    "hello": {
        "protocol": _protocol,
        "client": _text(MAX_CLIENT),
        "quiet": _boolean,
        "session": _secret,
        "sessionTimeout": _timeout,
        "token": _token,
        "namespace": namespace,
        "ref": _ref,
    },
    "bye": {"ref": _ref},
    "ping": {"ref": _ref},
    "inspect": {
        "resource": _name,
        "id": _id,
        "transactionName": _name,
        "limit": _integer(1, MAX_ROWS),
        "only": _only,
        "ref": _ref,
        "namespace": namespace,
    },
    "watch": {"prefix": _prefix, "ref": _ref, "namespace": namespace},
    "unwatch": {"prefix": _prefix, "ref": _ref, "namespace": namespace},
}
"""Every command with its fields. A null counts as left out."""

REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "extend": ("id", "transactionTimeout"),
    "watch": ("prefix",),
    "unwatch": ("prefix",),
}

BARE: Final = ("hello", "bye", "ping", "inspect")
"""Commands that may come without a payload."""

WITH_ID: Final = ("release", "extend")
"""Commands whose errors carry the `id` that they named."""


def bad_json(why: str) -> RequestRejected:
    """Return the refusal of a line that is not JSON."""
    return RequestRejected(Code.BAD_JSON, f"the line is not strict JSON in UTF-8: {why}")


def explain(line: bytes) -> RequestRejected | None:
    """Say what is wrong with a line that the typed decoder refused; None where nothing is.

    The decoder checks every value of a key that is given twice, while only the last one counts.
    """
    try:
        message = codec.loads(line)
    except ValueError as error:
        return bad_json(str(error))
    if _deeper(message, MAX_DEPTH):
        return RequestRejected(Code.BAD_JSON, f"nested deeper than {MAX_DEPTH}")
    if type(message) is not dict or type(message.get("command")) is not str:
        return RequestRejected(Code.BAD_MESSAGE, 'a line must be an object: {"command": string, "payload": object}')
    return _explain_message(message, message["command"], message.get("payload"))


def _explain_message(message: dict[str, Any], command: str, payload: Any) -> RequestRejected | None:
    ref = payload.get("ref") if type(payload) is dict else None
    ref = ref if _ref(ref) is None else None
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        return RequestRejected(Code.UNKNOWN_COMMAND, f"{command[:64]!r} is no command; there are {known}", ref=ref)
    if payload is None and command in BARE:
        payload = {}
    if type(payload) is not dict:
        return RequestRejected(Code.BAD_MESSAGE, f"{command}: payload must be an object")
    id_ = payload.get("id") if command in WITH_ID else None
    id_ = id_ if _id(id_) is None else None
    for name in message:
        if name not in ("command", "payload"):
            unknown = f"{command}: unknown field {name[:64]!r} beside command and payload"
            return RequestRejected(Code.BAD_MESSAGE, unknown, ref=ref, id=id_)
    why = wrong(command, payload)
    return None if why is None else RequestRejected(Code.BAD_REQUEST, f"{command}: {why}", ref=ref, id=id_)


def is_hello(line: bytes) -> bool:
    """Whether a line is a `hello`, whatever may be wrong with it."""
    return _hello(line) is not None


def _hello(line: bytes) -> dict[str, Any] | None:
    try:
        message = codec.loads(line)
    except ValueError:
        return None
    return message if type(message) is dict and message.get("command") == "hello" else None


def hello_token(line: bytes) -> str | None:
    """Return the token in a `hello`, whatever else may be wrong with it; None if there is none."""
    message = _hello(line)
    if message is None or type(message.get("payload")) is not dict:
        return None
    token: str | None = message["payload"].get("token")
    return token if _token(token) is None else None


def wrong(command: str, payload: dict[str, Any]) -> str | None:
    """Explain the first thing that is wrong with a payload; None where nothing is."""
    checks = COMMANDS[command]
    for name in payload:
        if name not in checks:
            return _unknown_field(name, checks)
    known = {name: payload[name] for name in checks if payload.get(name) is not None}
    for name in REQUIRED.get(command, ()):
        if name not in known:
            return f"{name} is missing: it {checks[name](None)}"
    for name, value in known.items():
        must = checks[name](value)
        if must is not None:
            return f"{name} {must}"
    if command == "release" and not known.keys() & {"id", "ref"}:
        return "id is missing: it must be the id of a request; or give the ref of one of this session"
    return _together_wrong(known) if command == "request" else None


def _unknown_field(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name[:64], list(known), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"unknown field {name[:64]!r}; {hint}"


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
