"""Answers come in the order of the commands of a connection, and each belongs to one."""

from __future__ import annotations

from genie.testing.history import SAY, TELL, Entry
from genie.testing.judges.facts import Facts, Judge

ANSWERS = {"pong": "ping", "inspected": "inspect", "welcome": "hello", "extended": "extend"}


class Answers(Judge):
    """Keeps what each connection has still to be answered."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._due: dict[int, list[tuple[str, object]]] = {}
        """Commands by connection: the command, and its ref or id."""
        self._unsure: set[tuple[int, int]] = set()
        """Connections and ids of which `released` was taken for an answer, and may have come because of somebody else."""

    def before(self, entry: Entry) -> None:
        """A command, or what may be an answer."""
        if entry.connection in self.facts.forsaken:
            return
        if entry.kind == SAY:
            payload = entry.what["payload"]
            key = payload.get("ref", payload.get("id") if entry.what["command"] != "inspect" else None)
            self._due.setdefault(entry.connection, []).append((entry.what["command"], key))
        elif entry.kind == TELL:
            self._told(entry, self._due.setdefault(entry.connection, []))

    def _told(self, entry: Entry, due: list[tuple[str, object]]) -> None:
        command, payload = entry.what["command"], entry.what["payload"]
        if command in ANSWERS:
            self._answered(entry, due, ANSWERS[command], payload.get("id"))
        elif command == "queued":
            if ("request", payload.get("ref")) in due:
                self._answered(entry, due, "request", payload.get("ref"))
        elif command == "released":
            case = self.facts.case(entry)
            if case is not None and case.ended_at is None and payload["reason"] != "success":
                return  # nobody asked for it
            for kind in ("release", "extend"):
                if (kind, payload["id"]) in due:
                    due.remove((kind, payload["id"]))
                    if case is not None and case.ended_at is None:
                        self._unsure.add((entry.connection, payload["id"]))
                    break
        elif command == "error":
            self._refused(entry, due)

    def _refused(self, entry: Entry, due: list[tuple[str, object]]) -> None:
        payload = entry.what["payload"]
        keys = [payload[name] for name in ("ref", "id") if name in payload] or [None]
        found = [one for key in keys for one in due if one[1] == key]
        if found:
            due.remove(found[0])
        elif (entry.connection, payload.get("id")) in self._unsure:
            self._unsure.remove((entry.connection, payload.get("id")))
        else:
            self.facts.blame(entry.at, f"an error answers nothing that was asked: {payload}")

    def _answered(self, entry: Entry, due: list[tuple[str, object]], command: str, key: object) -> None:
        if (command, key) not in due:
            self.facts.blame(entry.at, f"{entry.what} answers nothing that was asked")
            return
        place = due.index((command, key))
        before = [one for one in due[:place] if one[0] not in ("release", "extend")]
        if before:
            self.facts.blame(entry.at, f"{entry.what} overtakes the answer to {before[0]}")
        del due[place]
