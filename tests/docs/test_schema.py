"""The JSON Schema of the wire is the one of the types, and agrees with the examples and with what the server accepts."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator
from pages import blocks
from transcript import steps

from genie.errors import RequestRejected
from genie.protocol import commands, schema
from genie.protocol.resources import split_by_mode

SCHEMA = schema.schema()
EXAMPLES = [step for block in blocks("protocol.md") if block.language == "transcript" for step in steps(block)]


def validator(definition: str, **changes: Any) -> Draft202012Validator:
    return Draft202012Validator({**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{definition}"}], **changes})


def closed(definitions: dict[str, Any]) -> dict[str, Any]:
    """The same schema, in which objects have only the listed fields."""
    return {
        name: {**one, "additionalProperties": False} if "properties" in one else one
        for name, one in definitions.items()
    }


COMMAND = validator("command")
MESSAGE = validator("message", **{"$defs": closed(SCHEMA["$defs"])})


def test_the_schema_that_is_checked_in_is_that_of_the_types() -> None:
    assert schema.PATH.read_bytes() == schema.text(), "run python -m genie.protocol.schema"


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("step", [step for step in EXAMPLES if step.action == "<-"], ids=lambda step: str(step.line))
def test_every_message_of_the_page_is_described_with_all_its_fields(step: Any) -> None:
    MESSAGE.validate(json.loads(step.text))


@pytest.mark.parametrize("step", [step for step in EXAMPLES if step.action == "->"], ids=lambda step: str(step.line))
def test_a_command_of_the_page_is_valid_if_the_server_accepts_it(step: Any) -> None:
    try:
        message = json.loads(step.text)
    except ValueError:
        return
    if not _has_wrong_units(message):  # a schema cannot compare numbers
        assert COMMAND.is_valid(message) == accepted(message)


def _has_wrong_units(message: Any) -> bool:
    """Return whether a request has units that exceed their limit, or several limits of one name."""
    try:
        split_by_mode(message["payload"]["resources"])
    except (KeyError, TypeError):
        return False
    except ValueError as error:
        return any(part in str(error) for part in ("K <= N", "with limits of", "in total"))
    return False


def accepted(message: object) -> bool:
    try:
        commands.read(orjson.dumps(message))
    except RequestRejected:
        return False
    return True


REQUEST = {"resources": ["exclusive:a"]}
CHOICE = {"anyOf": ["exclusive:a"], "target": 1}


@pytest.mark.parametrize(
    ("command", "payload"),
    [
        ("request", {}),
        ("request", {**REQUEST, "target": None}),
        ("request", {**REQUEST, "target": 1}),
        ("request", {**REQUEST, **CHOICE}),
        ("request", {**REQUEST, "note": "x" * 256}),
        ("request", {**REQUEST, "note": "x" * 257}),
        ("request", {**REQUEST, "note": "a\nb"}),
        ("request", {**REQUEST, "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}),
        ("request", {**REQUEST, "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n"}),
        ("request", {**REQUEST, "traceparent": "00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01"}),
        ("request", {**REQUEST, "transactionName": ""}),
        ("request", {**REQUEST, "queueTimeout": 2147483647}),
        ("request", {**REQUEST, "queueTimeout": 2147483648}),
        ("request", {**REQUEST, "onDisconnect": "stay"}),
        ("request", {"resources": ["a"]}),
        ("request", CHOICE),
        ("request", {**CHOICE, "target": "9" * 78}),
        ("request", {**CHOICE, "target": "9" * 79}),
        ("request", {**CHOICE, "target": "01"}),
        ("request", {**CHOICE, "target": "1\n"}),
        ("request", {**CHOICE, "target": 0.5}),
        ("request", {**CHOICE, "weights": []}),
        ("release", {}),
        ("release", {"id": None}),
        ("release", {"ref": "r"}),
        ("release", {"id": 1}),
        ("release", {"id": 2**53}),
        ("extend", {"id": 1}),
        ("extend", {"id": 1, "transactionTimeout": 5}),
        ("hello", {"protocol": 1, "client": "a/1", "quiet": True, "session": "x" * 16}),
        ("hello", {"session": "x" * 15}),
        ("hello", {"namespace": "a b"}),
        ("hello", {"namespace": "a\n"}),
        ("hello", {"quiet": "yes"}),
        ("bye", {"ref": ""}),
        ("ping", {"id": 1}),
        ("inspect", {"only": "holder"}),
        ("watch", {}),
        ("watch", {"prefix": ""}),
        ("fly", {}),
    ],
    ids=str,
)
def test_the_schema_and_the_server_accept_the_same(command: str, payload: dict[str, Any]) -> None:
    message = {"command": command, "payload": payload}
    assert COMMAND.is_valid(message) == accepted(message)
