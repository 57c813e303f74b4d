"""The timeline of a simulated world: locks, faults and notes, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from genie.testing.faults import SERVERS
from genie.testing.simulation.history import CLIENT_RECEIVED, CLIENT_SENT, FAULT, NOTE, SERVER_SENT, Entry

MAX_LINES = 2_000
"""Maximum number of lines; the latest are kept."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a timeline."""

    at_s: float
    process: str
    kind: str
    """`lock`, `fault` or `note`."""
    text: str


def timeline(entries: Sequence[Entry]) -> list[Line]:
    """Return the lines of a run: what the service asked for and got, what the servers ended, faults, and notes."""
    return list(_lines(entries))[-MAX_LINES:]


class _Requests:
    """The requests of a run, by which their messages are explained."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, object], str] = {}
        """The resources of each request, by the number of its connection and `ref`, which several clients may use."""
        self._by_id: dict[int, tuple[str, str]] = {}
        """The process and the resources of each request, by id."""
        self._ended: set[int] = set()
        self._held: set[int] = set()

    def explain(self, entry: Entry) -> tuple[str, str] | None:
        """Return the process and the text for a message about a lock; None if it tells nothing new."""
        command, payload = entry.data.get("command"), entry.data.get("payload", {})
        id_ = payload.get("id")
        if entry.kind == CLIENT_SENT and command == "request":
            self._wanted[entry.connection, payload.get("ref")] = ", ".join(
                payload.get("resources", ["a free resource"])
            )
        elif entry.kind == CLIENT_RECEIVED and command in ("queued", "locked"):
            wanted = self._wanted.get((entry.connection, payload.get("ref")), "")
            self._by_id.setdefault(id_, (entry.node, wanted))
            if command == "locked" and id_ not in self._held:
                self._held.add(id_)
                return entry.node, f"holds {wanted}, fence {payload.get('fence')}"
        elif command == "released" and id_ in self._by_id and id_ not in self._ended:
            self._ended.add(id_)
            process, wanted = self._by_id[id_]
            reason = payload.get("reason")
            return process, f"released {wanted}" if reason == "success" else f"the server ended {wanted}: {reason}"
        return None


def _is_exit_of_server(entry: Entry) -> bool:
    """Return whether the simulated machine of a server has noted that the server exited; the service did not crash it."""
    return entry.node.partition(".")[0] in SERVERS and entry.data.startswith("exit status")


def _lines(entries: Sequence[Entry]) -> Iterator[Line]:
    requests = _Requests()
    for entry in entries:
        if entry.kind in (FAULT, NOTE):
            if entry.kind == FAULT or not _is_exit_of_server(entry):
                yield Line(entry.at, entry.node or "redis", "fault" if entry.kind == FAULT else "note", entry.data)
        elif entry.kind in (CLIENT_SENT, CLIENT_RECEIVED, SERVER_SENT):
            explained = requests.explain(entry)
            if explained is not None:
                yield Line(entry.at, explained[0], "lock", explained[1])


def as_text(lines: Sequence[Line]) -> str:
    """Return a timeline as aligned text, one line for each event. Times are seconds."""
    width = max((len(line.process) for line in lines), default=0)
    marks = {"fault": "!", "note": "·", "lock": " "}
    indent = "\n" + " " * (width + 15)
    return "\n".join(
        f"{line.at_s:10.3f}  {line.process:<{width}} {marks[line.kind]} {line.text.replace(chr(10), indent)}"
        for line in lines
    )


def as_page(title: str, plan: str, lines: Sequence[Line]) -> str:
    """Return a timeline as a self-contained HTML page: a column for each process, a row for each event."""
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
