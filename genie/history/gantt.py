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
"""Returns the horizontal position, in pixels, of a time in Unix ms."""
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
    """Return an SVG chart with one row for each request, in the given order. Times are in Unix ms.

    The time axis begins with the first request, but not before `since_ms`. It ends with the last recorded end, but not
    after `until_ms`.
    """
    start = min((entry.begins_at for entry in entries), default=until_ms - 1)
    if since_ms is not None:
        start = max(start, since_ms)
    last_end = max((entry.last_at or until_ms for entry in entries), default=until_ms)
    end = min(until_ms, last_end)
    span_ms = max(1.0, end - start)
    height = TOP_MARGIN_PX + ROW_HEIGHT_PX * len(entries) + BOTTOM_MARGIN_PX

    def x(at: float) -> float:
        share = max(0.0, min(at, end) - start) / span_ms
        return LABEL_WIDTH_PX + (WIDTH_PX - LABEL_WIDTH_PX - RIGHT_MARGIN_PX) * share

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" width="{WIDTH_PX}" height="{height}">',
        f"<title>Requests from {_format_time(start, span_ms)} to {_format_time(end, span_ms)} UTC</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH_PX}" height="{height}" fill="#fff"/>',
        '<rect class="wait" x="10" y="10" width="12" height="12"/><text x="27" y="20">waits</text>',
        '<rect class="held" x="80" y="10" width="12" height="12"/><text x="97" y="20">holds</text>',
        '<rect class="shared" x="150" y="10" width="12" height="12"/><text x="167" y="20">holds shared</text>',
    ]
    anchors = ["start", *["middle"] * (TICK_COUNT - 2), "end"]  # the outer labels do not extend beyond the axis
    for tick, anchor in enumerate(anchors):
        at = start + span_ms * tick / (TICK_COUNT - 1)
        top, bottom = TOP_MARGIN_PX - 6, height - BOTTOM_MARGIN_PX + 4
        lines.append(f'<line class="tick" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{top}" y2="{bottom}"/>')
        label = _format_time(at, span_ms)
        lines.append(f'<text x="{x(at):.1f}" y="{height - 10}" text-anchor="{anchor}">{label}</text>')
    for row, entry in enumerate(entries):
        lines += _row(entry, TOP_MARGIN_PX + ROW_HEIGHT_PX * row, x, until_ms)
    return "\n".join([*lines, "</svg>", ""])


def _row(entry: Entry, y: float, x: Scale, until_ms: float) -> Iterator[str]:
    """Yield the SVG elements of one request: its label and its bars, with its details as a tooltip.

    `y` is the top of the row in pixels, and `x` the horizontal scale. The bar of a live request ends at `until_ms`.
    """
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
        is_shared = entry.mode == Mode.SHARED or not (entry.exclusive or entry.units)
        kind = "shared" if is_shared else "held"
        yield _bar(kind, x(entry.granted_at), x(end), y + 3, ROW_HEIGHT_PX - 6)
    if entry.reason not in (None, Reason.SUCCESS) and end <= until_ms:
        yield f'<rect class="lost" x="{x(end) - 1:.1f}" y="{y + 1}" width="3" height="{ROW_HEIGHT_PX - 2}"/>'
        yield f'<text x="{min(x(end) + 5, WIDTH_PX - 130):.1f}" y="{y + 14}">{entry.reason}</text>'
    yield "</g>"


def _bar(kind: str, left: float, right: float, y: float, height: float) -> str:
    """Return a rectangle of at least one pixel. `kind` is a class of `STYLE`, all other arguments are in pixels."""
    return f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="{height}"/>'


def _format_time(at_ms: float, span_ms: float) -> str:
    """Return a time of day in UTC, with milliseconds if the chart spans less than a minute."""
    time = datetime.fromtimestamp(at_ms / 1000, UTC).time()
    return time.isoformat("seconds" if span_ms >= MINUTE_MS else "milliseconds")
