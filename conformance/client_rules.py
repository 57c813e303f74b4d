"""What holds for every command of a client in every case: known fields, refs, `hello` first, one secret for a session."""

from __future__ import annotations

import json
from typing import Any, Final

FIELDS: Final[dict[str, frozenset[str]]] = {
    "hello": frozenset(
        {"protocol", "client", "quiet", "session", "sessionTimeout", "token", "namespace", "note", "ref"}
    ),
    "request": frozenset(
        {"resources", "anyOf", "weights", "target", "queueTimeout", "transactionTimeout", "transactionName"}
        | {"priority", "ref", "onDisconnect", "note", "traceparent", "namespace"}
    ),
    "release": frozenset({"id", "ref", "namespace"}),
    "extend": frozenset({"id", "transactionTimeout", "ref", "namespace"}),
    "ping": frozenset({"ref"}),
    "inspect": frozenset({"resource", "id", "transactionName", "limit", "only", "ref", "namespace"}),
    "watch": frozenset({"prefix", "ref", "namespace"}),
    "unwatch": frozenset({"prefix", "ref", "namespace"}),
    "bye": frozenset({"ref"}),
}
"""The fields of each command. A server rejects others."""
MAX_REF: Final = 128


class SentCommands:
    """The commands that the client has sent in a case, on all of its connections. `violations` says what was wrong."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.log: list[dict[str, Any]] = []
        """All commands of the case, in the order of their arrival."""
        self._greeted: dict[object, str] = {}
        """The connections: `new`, `hello` sent, or `welcome` sent."""
        self._requests: dict[str, Any] = {}
        """The payloads of requests by their `ref`."""

    def forget_session(self) -> None:
        """Begin a new session: refs may be used again."""
        self._requests.clear()

    def on_connection(self, connection: object) -> None:
        """Record a new connection."""
        self._greeted[connection] = "new"

    def on_welcome(self, connection: object) -> None:
        """Record that the server has accepted `hello`."""
        self._greeted[connection] = "welcome"

    def check(self, connection: object, line: bytes) -> dict[str, Any] | None:
        """Return a command, or None if the line is none. Records violations."""
        try:
            message = json.loads(line)
            command, payload = message["command"], message.get("payload", {})
            unknown = set(payload) - FIELDS[command]
            is_command = isinstance(payload, dict) and not set(message) - {"command", "payload"}
        except (ValueError, KeyError, TypeError, AttributeError):
            is_command, unknown, command, payload = False, set(), "", {}
        if not is_command:
            self.violations.append(f"section Transport: the client sent {line[:200]!r}, which is not a command")
            return None
        if unknown:
            self.violations.append(f"section Transport: {command} has unknown fields: {sorted(unknown)}")
        self._check_greeting(connection, command)
        self._check_ref(command, payload)
        message = {"command": command, "payload": payload}
        self.log.append(message)
        return message

    def _check_greeting(self, connection: object, command: str) -> None:
        """Rule 1: `hello` first, and nothing but `ping` until `welcome`."""
        state = self._greeted[connection]
        if state == "new":
            if command != "hello":
                self.violations.append(f"rule 1: the first command of a connection is {command}, not hello")
            self._greeted[connection] = "hello"
        elif command == "hello":
            self.violations.append("rule 1: a second hello on a connection")
        elif state == "hello" and command != "ping":
            self.violations.append(f"rule 1: {command} was sent before welcome")

    def _check_ref(self, command: str, payload: dict[str, Any]) -> None:
        """Rule 3: each command has its own `ref`; a repeated request has the same payload."""
        ref = payload.get("ref")
        if not isinstance(ref, str) or not 0 < len(ref) <= MAX_REF:
            self.violations.append(f"rule 3: the ref of {command} is {ref!r}")
            return
        if command == "request":
            # After the loss of a session a request is repeated with the rest of its queueTimeout.
            meaning = {key: value for key, value in payload.items() if key != "queueTimeout" and value is not None}
            if self._requests.setdefault(ref, meaning) != meaning:
                self.violations.append(f"rule 3: the ref {ref!r} is used for two requests that differ")
        elif ref in self._requests and not (command == "release" and payload.get("id") is None):
            self.violations.append(f"rule 3: {command} has the ref {ref!r} of a request")
