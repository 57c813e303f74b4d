"""Finds the error message for a line that the typed decoder of `commands.py` has rejected.

Each type of field has a check: a function that returns the requirement that a value violates. The result is a
`RequestRejected`, whose message names the invalid field. It contains the `ref` of the command if the `ref` is valid,
and for `release` and `extend` the `id` if the `id` is valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from genie.errors import Code, RequestRejected
from genie.protocol import codec
from genie.protocol.limits import (
    DECIMAL_PATTERN,
    MAX_CLIENT,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_ID,
    MAX_KEYS,
    MAX_NAMESPACE,
    MAX_NOTE,
    MAX_PRIORITY,
    MAX_REF,
    MAX_ROWS,
    MAX_SECRET,
    MAX_TIMEOUT_MS,
    MAX_TOKEN,
    MAX_VALUES,
    MAX_WEIGHT,
    MIN_SECRET,
    NAMESPACE_PATTERN,
    PROTOCOL,
    TRACEPARENT_PATTERN,
)
from genie.protocol.resources import (
    CONTROL_CHARACTERS,
    MAX_CHOICES,
    MAX_NAME,
    MAX_RESOURCES,
    check_name,
    parse_choices,
    split_checked,
)

Check = Callable[[Any], str | None]
"""Returns the requirement that a value violates, such as `must be a string`, or None if the value is valid."""


STRING_RULE: Final = "must be a string"
ID_RULE: Final = f"must be an integer of at most {MAX_ID}"
RESOURCES_RULE: Final = (
    f'must be a list of 1 to {MAX_RESOURCES} strings like "shared:NAME", "exclusive:NAME" or "2/10:NAME"'
)
ANY_OF_RULE: Final = f'must be a list of 1 to {MAX_CHOICES} strings like "shared:NAME", "exclusive:NAME" or "2/10:NAME"'
_WEIGHT: Final = f"an integer from 1 to {MAX_WEIGHT}, or one of at most {MAX_DIGITS} digits as a string"
WEIGHT_RULE: Final = f"must be {_WEIGHT}"
WEIGHTS_RULE: Final = f"must be a list, with {_WEIGHT} for each of anyOf"


def _require(rule: str, is_valid: Callable[[Any], bool]) -> Check:
    """Return a check that returns `rule` for each value that is not valid."""
    return lambda value: None if is_valid(value) else rule


def _string_check(low: int, high: int, kind: str = "string") -> Check:
    return _require(
        f"must be a {kind} of {low} to {high} characters",
        lambda value: type(value) is str and low <= len(value) <= high,
    )


def _number_rule(low: float, high: float) -> str:
    """Return the requirement for numbers from `low` to `high`, with a space between thousands."""
    return f"must be a number from {low:,} to {high:,}".replace(",", " ")


def _number_check(low: float, high: float) -> Check:
    return _require(_number_rule(low, high), lambda value: type(value) in (int, float) and low <= value <= high)


def _error_of(read: Callable[[Any], object], prefix: str = "is invalid: ") -> Check:
    """Return a check that calls `read(value)`, and returns the text of its ValueError after `prefix`."""

    def check(value: Any) -> str | None:
        try:
            read(value)
        except ValueError as error:
            return prefix + str(error).removeprefix("a name ")
        return None

    return check


def _first_of(*checks: Check) -> Check:
    """Return a check that returns the first requirement which a value violates, in the order of `checks`."""

    def check_in_order(value: Any) -> str | None:
        for check in checks:
            violated = check(value)
            if violated is not None:
                return violated
        return None

    return check_in_order


TIMEOUT_RULE: Final = _number_rule(1, MAX_TIMEOUT_MS)

_id_error = _require(ID_RULE, lambda value: type(value) is int and abs(value) <= MAX_ID)
_ref_error = _string_check(1, MAX_REF)
_token_error = _string_check(1, MAX_TOKEN)
_name_error = _first_of(_require(STRING_RULE, lambda value: type(value) is str), _error_of(check_name, ""))

_NAMESPACE: Final = re.compile(NAMESPACE_PATTERN)
namespace_error: Check = _require(
    f"must be a string of 1 to {MAX_NAMESPACE} letters, digits or any of _.:-",
    lambda value: type(value) is str and len(value) <= MAX_NAMESPACE and _NAMESPACE.fullmatch(value) is not None,
)


def _are_strings(value: Any) -> bool:
    return all(type(each) is str for each in value)


def _is_list(value: Any, max_length: int) -> bool:
    return type(value) is list and 0 < len(value) <= max_length


_resources_error = _first_of(
    _require(RESOURCES_RULE, lambda value: _is_list(value, MAX_RESOURCES)),
    _require('must contain only strings like "shared:NAME", "exclusive:NAME" or "2/10:NAME"', _are_strings),
    _error_of(split_checked),
)
_any_of_error = _first_of(
    _require(ANY_OF_RULE, lambda value: _is_list(value, MAX_CHOICES) and _are_strings(value)), _error_of(parse_choices)
)

_DECIMAL: Final = re.compile(DECIMAL_PATTERN)


def _is_weight(value: Any) -> bool:
    if type(value) is str:
        return len(value) <= MAX_DIGITS and _DECIMAL.fullmatch(value) is not None
    return type(value) is int and 0 < value <= MAX_WEIGHT


def check_weights(weights: list[int | str]) -> None:
    """Raise ValueError if a weight is a string, but not a decimal number.

    The lengths of the strings must be checked already.
    """
    texts = [weight for weight in weights if type(weight) is str]
    digits = "".join(texts)
    if digits and not (digits.isascii() and digits.isdecimal() and all(text and text[0] != "0" for text in texts)):
        raise ValueError(f"weights {WEIGHTS_RULE}")


def _prefix_error(value: Any) -> str | None:
    """Return the requirement that a prefix of names violates, or None. Unlike a name, a prefix may be empty."""
    if value == "":
        return None
    error = _name_error(value)
    return None if error is None else error.replace(f"1 to {MAX_NAME}", f"at most {MAX_NAME}")


def _check_text(value: Any, max_length: int) -> None:
    """Raise ValueError unless `value` is a string of 1 to `max_length` characters without control characters."""
    if type(value) is not str or not 0 < len(value) <= max_length:
        raise ValueError(f"must be a string of 1 to {max_length} characters")
    if not value.isprintable() and CONTROL_CHARACTERS.search(value):
        raise ValueError("must not contain control characters")


_TRACEPARENT: Final = re.compile(TRACEPARENT_PATTERN)


def check_note(note: str) -> None:
    """Raise ValueError if the field `note` is invalid."""
    _check_text(note, MAX_NOTE)


def check_client(client: str) -> None:
    """Raise ValueError if the field `client` is invalid."""
    _check_text(client, MAX_CLIENT)


_timeout_check = _number_check(1, MAX_TIMEOUT_MS)

FIELD_CHECKS: Final[Mapping[str, Mapping[str, Check]]] = {
    "request": {
        "resources": _resources_error,
        "anyOf": _any_of_error,
        "weights": _require(
            WEIGHTS_RULE, lambda value: type(value) is list and bool(value) and all(map(_is_weight, value))
        ),
        "target": _require(WEIGHT_RULE, _is_weight),
        "queueTimeout": _number_check(0, MAX_TIMEOUT_MS),
        "transactionTimeout": _timeout_check,
        "transactionName": _name_error,
        "priority": _number_check(-MAX_PRIORITY, MAX_PRIORITY),
        "ref": _ref_error,
        "onDisconnect": _require('must be "keep" or "release"', lambda value: value in ("keep", "release")),
        "note": _error_of(check_note, ""),
        "traceparent": _require(
            'must be a traceparent of W3C Trace Context, "VERSION-TRACE_ID-PARENT_ID-FLAGS" in lowercase hexadecimal digits',
            lambda value: type(value) is str and _TRACEPARENT.fullmatch(value) is not None,
        ),
        "namespace": namespace_error,
    },
    "release": {"id": _id_error, "ref": _ref_error, "namespace": namespace_error},
    "extend": {"id": _id_error, "transactionTimeout": _timeout_check, "ref": _ref_error, "namespace": namespace_error},
    "hello": {
        "protocol": _require(f"must be an integer, the protocol version: {PROTOCOL}", lambda value: type(value) is int),
        "client": _error_of(check_client, ""),
        "quiet": _require("must be true or false", lambda value: type(value) is bool),
        "session": _string_check(MIN_SECRET, MAX_SECRET, "secret"),
        "sessionTimeout": _timeout_check,
        "token": _token_error,
        "namespace": namespace_error,
        "note": _error_of(check_note, ""),
        "ref": _ref_error,
    },
    "bye": {"ref": _ref_error},
    "ping": {"ref": _ref_error},
    "inspect": {
        "resource": _name_error,
        "id": _id_error,
        "transactionName": _name_error,
        "limit": _require(
            f"must be an integer from 1 to {MAX_ROWS}", lambda value: type(value) is int and 1 <= value <= MAX_ROWS
        ),
        "only": _require('must be "holders" or "queue"', lambda value: value in ("holders", "queue")),
        "ref": _ref_error,
        "namespace": namespace_error,
    },
    "watch": {"prefix": _prefix_error, "ref": _ref_error, "namespace": namespace_error},
    "unwatch": {"prefix": _prefix_error, "ref": _ref_error, "namespace": namespace_error},
}
"""The fields of each command, with their checks. A field that is null counts as omitted."""

REQUIRED_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "extend": {"id": ID_RULE, "transactionTimeout": TIMEOUT_RULE},
    "watch": {"prefix": STRING_RULE},
    "unwatch": {"prefix": STRING_RULE},
}
"""The required fields of each command, with the requirement that the error for a missing field states."""

PAYLOAD_OPTIONAL: Final = ("hello", "bye", "ping", "inspect")
"""Commands that are valid without a payload."""

COMMANDS_WITH_ID: Final = ("release", "extend")
"""Commands whose errors contain the `id` of the command."""


def bad_json(error: str) -> RequestRejected:
    """Return the error for a line that is not JSON."""
    return RequestRejected(Code.BAD_JSON, f"the line is not strict JSON in UTF-8: {error}")


def too_many_values() -> RequestRejected:
    """Return the error for a line with too many values or keys."""
    return bad_json(f"it has more than {MAX_VALUES} values, or more than {MAX_KEYS} keys")


def invalid_choices(error: ValueError, ref: str | None) -> RequestRejected:
    """Return the error for a `request` whose `anyOf` `parse_choices` has rejected with `error`."""
    reason = f"request: anyOf is invalid: {str(error).removeprefix('a name ')}"
    return RequestRejected(Code.BAD_REQUEST, reason, ref=ref)


_KEY: Final = re.compile(rb'"[ \t\r\n]*:')


def has_too_many_values(line: bytes) -> bool:
    """Return whether a line of more than `MAX_VALUES` bytes has more than `MAX_VALUES` values or `MAX_KEYS` keys.

    They would take tenths of a second to decode and to free.
    """
    # First count the separators and keys in the whole line, which is fast. Only if there are many, exclude those inside
    # strings.
    if len(line) <= MAX_VALUES or (_count_separators(line) <= MAX_VALUES and len(_KEY.findall(line)) <= MAX_KEYS):
        return False
    parts = line.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')  # every second part is a string
    outside_strings = b"".join(parts[::2])
    return (
        len(parts) > 2 * MAX_VALUES
        or _count_separators(outside_strings) > MAX_VALUES
        or outside_strings.count(b":") > MAX_KEYS
    )


def _count_separators(text: bytes) -> int:
    """Return the number of commas and opening brackets, which is about the number of values."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def explain(line: bytes) -> RequestRejected | None:
    """Return the error for a line that the typed decoder rejected, or None if the line is valid.

    The typed decoder may reject a valid line: it checks every value of a duplicate key, of which only the last one
    counts.
    """
    found = read_envelope(line)
    if isinstance(found, RequestRejected):
        return found
    error = payload_error(found.command, found.payload)
    if error is None:
        return None
    return RequestRejected(Code.BAD_REQUEST, f"{found.command}: {error}", ref=found.ref, id=found.id)


class Envelope(NamedTuple):
    """A decoded line with a known command, whose payload is not checked yet.

    `ref` and `id` are those of the payload if they are valid. `id` is None for commands whose errors do not contain it.
    """

    command: str
    payload: dict[str, Any]
    ref: str | None
    id: int | None


def read_envelope(line: bytes) -> Envelope | RequestRejected:
    """Decode a line without checking its payload. Return its error if it is malformed, or if its command is unknown."""
    if has_too_many_values(line):
        return too_many_values()
    try:
        message = codec.loads(line)
    except ValueError as error:
        return bad_json(codec.explain_malformed(line, error))
    if _is_deeper_than(message, MAX_DEPTH):
        return RequestRejected(Code.BAD_JSON, f"the JSON is nested deeper than {MAX_DEPTH} levels")
    if type(message) is not dict or type(message.get("command")) is not str:
        return RequestRejected(Code.BAD_MESSAGE, 'a line must be an object: {"command": string, "payload": object}')
    return _envelope_of(message, message["command"], message.get("payload"))


def _envelope_of(message: dict[str, Any], command: str, payload: Any) -> Envelope | RequestRejected:
    """Return the envelope of a decoded line, of which `command` and `payload` are parts, or its error."""
    ref = payload.get("ref") if type(payload) is dict else None
    ref = ref if _ref_error(ref) is None else None
    if command not in FIELD_CHECKS:
        known = ", ".join(FIELD_CHECKS)
        return RequestRejected(
            Code.UNKNOWN_COMMAND, f"unknown command {command[:64]!r}; known commands: {known}", ref=ref
        )
    if payload is None and command in PAYLOAD_OPTIONAL:
        payload = {}
    if type(payload) is not dict:
        return RequestRejected(Code.BAD_MESSAGE, f"{command}: payload must be an object")
    id_ = payload.get("id") if command in COMMANDS_WITH_ID else None
    id_ = id_ if _id_error(id_) is None else None
    for name in message:
        if name not in ("command", "payload"):
            unknown = f"{command}: unknown field {name[:64]!r}; a message has only command and payload"
            return RequestRejected(Code.BAD_MESSAGE, unknown, ref=ref, id=id_)
    return Envelope(command, payload, ref, id_)


def is_hello(line: bytes) -> bool:
    """Return whether the command of a line is `hello`. Its payload may be invalid."""
    return _decode_hello(line) is not None


def _decode_hello(line: bytes) -> dict[str, Any] | None:
    """Return the decoded line if its command is `hello`, else None. The payload of the `hello` may be invalid."""
    if has_too_many_values(line):
        return None
    try:
        message = codec.loads(line)
    except ValueError:
        return None
    return message if type(message) is dict and message.get("command") == "hello" else None


def hello_token(line: bytes) -> str | None:
    """Return the token of a `hello`, even if other fields are invalid. Return None if there is no valid token."""
    message = _decode_hello(line)
    if message is None or type(message.get("payload")) is not dict:
        return None
    token: str | None = message["payload"].get("token")
    return token if _token_error(token) is None else None


def payload_error(command: str, payload: dict[str, Any]) -> str | None:
    """Return the first error in the payload of a command, or None if the payload is valid."""
    checks = FIELD_CHECKS[command]
    for name in payload:
        if name not in checks:
            return _unknown_field_error(name, checks)
    # A field that is null counts as omitted.
    given = {name: payload[name] for name in checks if payload.get(name) is not None}
    for name, requirement in REQUIRED_FIELDS.get(command, {}).items():
        if name not in given:
            return f"{name} is missing: it {requirement}"
    for name, value in given.items():
        violated = checks[name](value)
        if violated is not None:
            return f"{name} {violated}"
    combination_error = COMBINATION_CHECKS.get(command)
    return None if combination_error is None else combination_error(given)


def _unknown_field_error(name: str, known: Iterable[str]) -> str:
    """Return the error for an unknown field, with the most similar known field, or a list of all known fields."""
    matches = get_close_matches(name[:64], list(known), n=1)
    hint = f"did you mean {matches[0]!r}?" if matches else f"known fields: {', '.join(known)}"
    return f"unknown field {name[:64]!r}; {hint}"


def _release_combination_error(payload: Mapping[str, Any]) -> str | None:
    """Return an error if a `release` has neither `id` nor `ref`, else None."""
    if payload.keys() & {"id", "ref"}:
        return None
    return "id is missing: give the id of a request, or the ref of a request of this session"


def _request_combination_error(payload: Mapping[str, Any]) -> str | None:
    """Return an error if the fields of a `request`, which are valid one by one, cannot be combined.

    Otherwise return None.
    """
    any_of, weights = payload.get("anyOf"), payload.get("weights")
    if any_of is None:
        for name in ("weights", "target"):
            if name in payload:
                return f"{name} requires anyOf, which is missing"
        return None if "resources" in payload else f"resources is missing: it {RESOURCES_RULE}"
    if "resources" in payload:
        return "resources and anyOf are mutually exclusive"
    if "target" not in payload:
        return f"target is missing: with anyOf it {WEIGHT_RULE}"
    if weights is not None and len(weights) != len(any_of):
        return f"weights must have as many entries as anyOf ({len(any_of)}), but has {len(weights)}"
    return None


COMBINATION_CHECKS: Final[Mapping[str, Callable[[Mapping[str, Any]], str | None]]] = {
    "release": _release_combination_error,
    "request": _request_combination_error,
}
"""The checks of the combination of fields of a command, after each field was checked."""


def _is_deeper_than(value: object, depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `depth` levels.

    The search is iterative, so that deeply nested input can't exhaust the stack.
    """
    values_of_level: list[object] = [value]
    for _ in range(depth + 1):
        inner_values: list[object] = []
        for outer in values_of_level:
            if isinstance(outer, dict):
                inner_values += outer.values()
            elif isinstance(outer, list):
                inner_values += outer
        if not inner_values:
            return False
        values_of_level = inner_values
    return True
