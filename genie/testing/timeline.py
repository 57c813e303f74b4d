"""The timeline of a simulated world: locks, faults and notes, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from genie.testing.faults import SERVERS
from genie.testing.simulation.history import CLIENT_RECEIVED, CLIENT_SENT, FAULT, NOTE, SERVER_SENT, Entry

MAX_LINES = 2_000
"""Maximum number of lines of a timeline. The latest are kept."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a timeline."""

    at_s: float
    """The virtual time."""
    process: str
    """The name of a process, a server, `redis` or `network`."""
    kind: str
    """`lock`, `fault` or `note`."""
    text: str


def timeline(entries: Sequence[Entry]) -> list[Line]:
    """Return the latest lines of a run: grants and ends of locks, faults, and notes."""
    return list(_lines(entries))[-MAX_LINES:]


class _Requests:
    """The requests of a run, by which messages about them are explained."""

    def __init__(self) -> None:
        self._locks_by_ref: dict[tuple[int, object], str] = {}
        """The locks of each request as text, by the number of its connection and its `ref`. Several clients may use a
        `ref`."""
        self._by_id: dict[int, tuple[str, str]] = {}
        """The process of each request, and its locks as text, by id."""
        self._ended: set[int] = set()
        """The ids of the requests whose end has a line."""
        self._held: set[int] = set()
        """The ids of the requests whose grant has a line."""

    def explain(self, entry: Entry) -> Line | None:
        """Return a line for a message about a lock, or None if the message has no new information."""
        command, payload = entry.data.get("command"), entry.data.get("payload", {})
        id_, request_key = payload.get("id"), (entry.connection, payload.get("ref"))
        if entry.kind == CLIENT_SENT and command == "request":
            self._locks_by_ref[request_key] = ", ".join(payload.get("resources", ["a free resource"]))
        elif entry.kind == CLIENT_RECEIVED and command in ("queued", "locked"):
            locks = self._locks_by_ref.get(request_key, "")
            self._by_id.setdefault(id_, (entry.node, locks))
            if command == "locked" and id_ not in self._held:
                self._held.add(id_)
                return Line(entry.at, entry.node, "lock", f"holds {locks}, fence {payload.get('fence')}")
        elif command == "released" and id_ in self._by_id and id_ not in self._ended:
            self._ended.add(id_)
            process, locks = self._by_id[id_]
            reason = payload.get("reason")
            text = f"released {locks}" if reason == "success" else f"the server ended {locks}: {reason}"
            return Line(entry.at, process, "lock", text)
        return None


def _is_exit_of_server(entry: Entry) -> bool:
    """Return whether a note is about a server that has exited, for example after it has lost its leadership."""
    return entry.node.partition(".")[0] in SERVERS and entry.data.startswith("exit status")


def _lines(entries: Sequence[Entry]) -> Iterator[Line]:
    """Yield all lines of a run."""
    requests = _Requests()
    for entry in entries:
        if entry.kind == FAULT:
            yield Line(entry.at, entry.node or "redis", "fault", entry.data)
        elif entry.kind == NOTE and not _is_exit_of_server(entry):
            yield Line(entry.at, entry.node or "redis", "note", entry.data)
        elif entry.kind in (CLIENT_SENT, CLIENT_RECEIVED, SERVER_SENT):
            line = requests.explain(entry)
            if line is not None:
                yield line


def as_text(lines: Sequence[Line]) -> str:
    """Return a timeline as aligned text, one line for each event. Times are in seconds."""
    process_width = max((len(line.process) for line in lines), default=0)
    marks = {"fault": "!", "note": "·", "lock": " "}
    continuation = "\n" + " " * (process_width + 15)  # a text of several lines is aligned with its first line
    return "\n".join(
        f"{line.at_s:10.3f}  {line.process:<{process_width}} {marks[line.kind]} "
        + line.text.replace("\n", continuation)
        for line in lines
    )


def as_page(title: str, plan: str, lines: Sequence[Line]) -> str:
    """Return a timeline as a self-contained HTML page: a column for each process, a row for each event.

    `plan` is shown above the timeline.
    """
    processes = list(dict.fromkeys(line.process for line in lines))
    head = "".join(f"<th>{escape(name)}</th>" for name in processes)
    rows = []
    for line in lines:
        cells = "".join(
            f'<td class="{line.kind}">{escape(line.text)}</td>' if name == line.process else "<td></td>"
            for name in processes
        )
        rows.append(f"<tr><th>{line.at_s:.3f}</th>{cells}</tr>")
    style = (
        "body{font:14px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
        "th,td{padding:3px 10px;text-align:left;vertical-align:top;border-left:1px solid #ddd}"
        "tbody th{font-weight:400;color:#667085;text-align:right;border:0}thead th{position:sticky;top:0;background:#fff}"
        ".fault{background:#fde8e8}.note{color:#175cd3}.lock{background:#ecfdf3}pre{background:#f5f7fb;padding:1em}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
        f"<h1>{escape(title)}</h1><pre>{escape(plan)}</pre><table><thead><tr><th>s</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></html>\n"
    )
