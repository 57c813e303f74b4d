"""A server that grants every request: it answers what a case does not script, and everything at the end of a case."""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol

REMAINING_MS = 60_000
"""The remaining time of a lock that is reported after a resume."""


class Answering(Protocol):
    """A connection as this server sees it."""

    def send(self, messages: list[Any]) -> None:
        """Send messages in one write."""

    def welcome(self, fields: dict[str, Any], hello: dict[str, Any]) -> None:
        """Answer `hello`."""

    def close(self) -> None:
        """Close the connection after everything was sent."""


class AutomaticServer:
    """Answers commands of any connection of a case. All connections belong to one session.

    Attributes:
        resumed: the value of `resumed` in `welcome`.
        unavailable: how many of the next requests and releases are answered `unavailable`.

    """

    def __init__(self) -> None:
        self.resumed = False
        self.unavailable = 0
        self._ids = count(100_000)
        self._held: dict[str, int] = {}
        """The ids of the locks by the `ref` of their request."""

    def answer(self, connection: Answering, command: str, payload: dict[str, Any]) -> None:
        """Answer a command."""
        echo = {"ref": payload["ref"]} if payload.get("ref") is not None else {}
        if command in ("request", "release") and self.unavailable > 0:
            self.unavailable -= 1
            fields = {"code": "unavailable", "message": "the store can't be reached"}
            connection.send([{"command": "error", "payload": fields | echo}])
            return
        match command:
            case "hello":
                self._welcome(connection, payload)
            case "request":
                connection.send(self._request(payload))
            case "release":
                connection.send([self._release(payload, echo)])
            case "bye":
                connection.send([{"command": "bye", "payload": echo}])
                connection.close()
            case _:
                connection.send([self._other(command, payload, echo)])

    def _welcome(self, connection: Answering, payload: dict[str, Any]) -> None:
        connection.welcome({"resumed": self.resumed}, payload)
        held = self._held.items() if self.resumed else ()
        connection.send([_locked(ref, lock, expiresIn=REMAINING_MS) for ref, lock in held])

    def _request(self, payload: dict[str, Any]) -> list[Any]:
        ref = str(payload.get("ref"))
        again: dict[str, Any] = {"expiresIn": REMAINING_MS} if ref in self._held else {}
        lock = self._held.setdefault(ref, next(self._ids))
        if "anyOf" in payload:
            again["resources"] = [resource.partition(":")[2] for resource in payload["anyOf"][:1]]
        return [{"command": "queued", "payload": {"id": lock, "ref": ref}}, _locked(ref, lock, **again)]

    def _release(self, payload: dict[str, Any], echo: dict[str, Any]) -> dict[str, Any]:
        lock = payload.get("id")
        if lock is None:
            lock = self._held.get(str(payload.get("ref")))
        if lock is None:
            fields: dict[str, Any] = {"code": "unknown-id", "message": "there is no request with this ref"}
            return {"command": "error", "payload": fields | echo}
        self._held = {ref: held for ref, held in self._held.items() if held != lock}
        return {"command": "released", "payload": {"id": lock, "reason": "success"} | echo}

    def _other(self, command: str, payload: dict[str, Any], echo: dict[str, Any]) -> dict[str, Any]:
        answers: dict[str, tuple[str, dict[str, Any]]] = {
            "ping": ("pong", {}),
            "extend": ("extended", {key: payload.get(key) for key in ("id", "transactionTimeout")}),
            "watch": ("watching", {"prefix": payload.get("prefix"), "held": [], "truncated": False}),
            "unwatch": ("unwatched", {"prefix": payload.get("prefix")}),
            "inspect": ("inspected", {"holders": [], "holdersTotal": 0, "queue": [], "queueTotal": 0}),
        }
        name, fields = answers[command]
        return {"command": name, "payload": fields | echo}


def _locked(ref: str, lock: int, **fields: Any) -> dict[str, Any]:
    """Return the message `locked`."""
    return {"command": "locked", "payload": {"id": lock, "fence": lock, "ref": ref} | fields}
