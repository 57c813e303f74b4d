"""Draws the requests of a search as a Gantt chart in SVG: when each one waited and held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html import escape
from typing import Final

from genie.core import Mode, Reason
from genie.history.search import Entry
from genie.text import printable

Scale = Callable[[float], float]
"""Returns the horizontal position of a time."""
WIDTH_PX: Final = 1_000
LABEL_WIDTH_PX: Final = 260
ROW_HEIGHT_PX: Final = 22
TOP_MARGIN_PX: Final = 36
BOTTOM_MARGIN_PX: Final = 30
RIGHT_MARGIN_PX: Final = 10
TICK_COUNT: Final = 6
MAX_LABEL_LENGTH: Final = 38
MINUTE_MS: Final = 60_000
STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#222}.tick{stroke:#ddd}.wait{fill:#f0b429}.held{fill:#2f6fab}"
    ".shared{fill:#7fb2de}.lost{fill:#c0392b}"
)


def draw(entries: list[Entry], since_ms: float | None, until_ms: float) -> str:
    """Return an SVG chart with one row for each request, in the given order.

    The time axis begins at `since_ms`, or with the first request if `since_ms` is None. It ends at `until_ms` or at the last
    recorded end, whichever is earlier.
    """
    start = min((entry.begins_at for entry in entries), default=until_ms - 1)
    start = start if since_ms is None else max(start, since_ms)
    end = min(until_ms, max((entry.last_at or until_ms for entry in entries), default=until_ms))
    span = max(1.0, end - start)
    height = TOP_MARGIN_PX + ROW_HEIGHT_PX * len(entries) + BOTTOM_MARGIN_PX

    def x(at: float) -> float:
        return LABEL_WIDTH_PX + (WIDTH_PX - LABEL_WIDTH_PX - RIGHT_MARGIN_PX) * max(0.0, min(at, end) - start) / span

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" width="{WIDTH_PX}" height="{height}">',
        f"<title>Requests from {_format_time(start, span)} to {_format_time(end, span)} UTC</title><style>{STYLE}</style>",
        f'<rect width="{WIDTH_PX}" height="{height}" fill="#fff"/>',
        '<rect class="wait" x="10" y="10" width="12" height="12"/><text x="27" y="20">waits</text>',
        '<rect class="held" x="80" y="10" width="12" height="12"/><text x="97" y="20">holds</text>',
        '<rect class="shared" x="150" y="10" width="12" height="12"/><text x="167" y="20">holds shared</text>',
    ]
    for tick in range(TICK_COUNT):
        at = start + span * tick / (TICK_COUNT - 1)
        anchor = "end" if tick == TICK_COUNT - 1 else "middle" if tick else "start"
        lines.append(
            f'<line class="tick" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP_MARGIN_PX - 6}" y2="{height - BOTTOM_MARGIN_PX + 4}"/>'
        )
        lines.append(f'<text x="{x(at):.1f}" y="{height - 10}" text-anchor="{anchor}">{_format_time(at, span)}</text>')
    for row, entry in enumerate(entries):
        lines += _row(entry, TOP_MARGIN_PX + ROW_HEIGHT_PX * row, x, until_ms)
    return "\n".join([*lines, "</svg>", ""])


def _row(entry: Entry, y: float, x: Scale, until_ms: float) -> Iterator[str]:
    """Yield the label and the bars of one request, with its details as a tooltip."""
    label = entry.transaction or entry.note or entry.client or str(entry.id)
    shown = label if len(label) <= MAX_LABEL_LENGTH else label[: MAX_LABEL_LENGTH - 1] + "…"
    tooltip = f"{entry.id} {' '.join(entry.locks)}" + (f" — {entry.note}" if entry.note else "")
    if entry.reason is not None:
        tooltip += f" — ended: {entry.reason}"
    elif entry.record_ends_at is not None:
        tooltip += " — its end is not recorded"
    yield f"<g><title>{escape(printable(tooltip))}</title>"
    yield f'<text x="{LABEL_WIDTH_PX - 10}" y="{y + 14}" text-anchor="end">{escape(printable(shown))}</text>'
    end = until_ms if entry.last_at is None else entry.last_at
    if entry.asked_at is not None and entry.granted_at != entry.asked_at:
        yield _bar("wait", x(entry.asked_at), x(entry.granted_at or end), y + 7, ROW_HEIGHT_PX - 14)
    if entry.granted_at is not None:
        kind = "shared" if entry.mode == Mode.SHARED or not (entry.exclusive or entry.units) else "held"
        yield _bar(kind, x(entry.granted_at), x(end), y + 3, ROW_HEIGHT_PX - 6)
    if entry.reason not in (None, Reason.SUCCESS) and end <= until_ms:
        yield f'<rect class="lost" x="{x(end) - 1:.1f}" y="{y + 1}" width="3" height="{ROW_HEIGHT_PX - 2}"/>'
        yield f'<text x="{min(x(end) + 5, WIDTH_PX - 130):.1f}" y="{y + 14}">{entry.reason}</text>'
    yield "</g>"


def _bar(kind: str, left: float, right: float, y: float, height: float) -> str:
    return f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="{height}"/>'


def _format_time(at_ms: float, span_ms: float) -> str:
    """Return a time of day. The shorter the span of the chart, the more decimals the time has."""
    text = f"{datetime.fromtimestamp(at_ms / 1000, UTC):%H:%M:%S.%f}"
    return text[:8] if span_ms >= MINUTE_MS else text[:12]
