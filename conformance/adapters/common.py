"""What the adapters of both Python clients have in common: options, errors and results in the adapter protocol."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

import genie

_output_mutex = threading.Lock()


def write(message: dict[str, Any]) -> None:
    """Write an answer or an event."""
    line = json.dumps(message) + "\n"
    with _output_mutex:
        sys.stdout.write(line)
        sys.stdout.flush()


def seconds(milliseconds: float | None) -> float | None:
    """Convert a time."""
    return None if milliseconds is None else milliseconds / 1000


def connect_arguments(addresses: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `connect`. The clients have one timeout for a round over all addresses and for entering."""
    arguments: dict[str, Any] = {"host": list(addresses)}
    if options.get("connectTimeout") is not None:
        arguments["connect_timeout"] = options["connectTimeout"] * len(addresses) / 1000
    arguments["response_timeout"] = options.get("maxUnavailable", 10_000) / 1000
    if options.get("sessionTimeout") is not None:
        arguments["session_timeout"] = options["sessionTimeout"] / 1000
    arguments["token"] = options.get("token") or ""
    if options.get("namespace") is not None:
        arguments["namespace"] = options["namespace"]
    return arguments


def request_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `acquire`, `try_acquire` or `acquire_any` besides the resources."""
    options = call.get("options") or {}
    names = {
        "transactionName": "transaction",
        "priority": "priority",
        "onDisconnect": "on_disconnect",
        "note": "note",
        "watchdog": "watchdog",
    }
    arguments = {name: options[key] for key, name in names.items() if options.get(key) is not None}
    for key, name in {"queueTimeout": "queue_timeout", "transactionTimeout": "transaction_timeout"}.items():
        if options.get(key) is not None:
            arguments[name] = options[key] / 1000
    if call["do"] == "acquireAny":
        arguments["target"] = int(call.get("target") or 1)
        if call.get("weights") is not None:
            arguments["weights"] = [int(weight) for weight in call["weights"]]
    return arguments


def lock_result(number: int, lock: genie.Lock | genie.sync.Lock) -> dict[str, Any]:
    """Return the `ok` of an acquired lock."""
    return {"lock": number, "id": lock.id, "fence": lock.fence, "resources": list(lock.resources)}


def inspection_result(inspection: genie.Inspection) -> dict[str, Any]:
    """Return the `ok` of `inspect`."""

    def row(entry: Any) -> dict[str, Any]:
        return {"id": entry.id, "resources": list(entry.resources)}

    return {
        "holders": [row(entry) for entry in inspection.holders],
        "queue": [row(entry) for entry in inspection.queue],
        "holdersTotal": inspection.holders_total,
        "queueTotal": inspection.queue_total,
    }


def change_event(number: int, change: Any) -> dict[str, Any]:
    """Return the event of a change."""
    fields = {"state": change.state, "resource": change.resource, "mode": change.mode, "id": change.id}
    return {"event": "watch", "watch": number, "change": fields}


def error_result(error: BaseException) -> dict[str, Any]:
    """Return the `error` of a call."""
    fields: dict[str, Any] = {"type": error_type(error), "message": f"{type(error).__name__}: {error}"}
    if isinstance(error, genie.QueueTimeout):
        fields["blockers"] = [
            {"id": blocker.id, "resource": blocker.resource, "units": blocker.units, "of": blocker.of}
            for blocker in error.blockers
        ]
    elif isinstance(error, genie.Deadlock):
        fields["cycle"] = list(error.cycle)
    elif isinstance(error, genie.Insufficient):
        fields |= {"free": str(error.free), "locked": str(error.locked)}
    return fields


_TYPES: list[tuple[type[BaseException], str]] = [
    (genie.QueueTimeout, "queue-timeout"),
    (genie.Deadlock, "deadlock"),
    (genie.Insufficient, "insufficient"),
    (genie.TransactionTimeout, "transaction-timeout"),
    (genie.Disconnected, "disconnected"),
    (genie.Unavailable, "unavailable"),
]


def error_type(error: BaseException) -> str:
    """Return the type of an error in the adapter protocol."""
    for kind, name in _TYPES:
        if isinstance(error, kind):
            return name
    text = str(error)
    if isinstance(error, genie.RequestRejected):
        return error.code
    if isinstance(error, genie.ConnectionLost):
        return "closed" if "was closed" in text else "disconnected"
    if isinstance(error, genie.LockLost):
        return _reason(text, "ended: ") or ("success" if "was released by its id" in text else "lost")
    if isinstance(error, genie.LockError):
        return _reason(text, "before it was granted: ") or "success"
    return type(error).__name__


def _reason(text: str, words: str) -> str:
    """Return the reason that the text of an error ends with; empty: it has none."""
    return text.partition(words)[2]
