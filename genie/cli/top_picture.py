"""What `genie top` shows: a picture of a server, made to fit a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import UnsetType

from genie.admin.answers import Edge, HotList, State, Waits
from genie.cli.fitted import Column, fitted, wrapped
from genie.cli.tables import clip, duration

LEADER = "leader"
BOLD, DIM, BAD = "bold", "dim", "bold red"
MOST = 20
"""Rows of a part, however tall the terminal is."""
SMALL = 10
"""Rates, and waits in ms, have a digit behind the point below this."""

LINES = (
    Column("RESOURCE", 0, least=12, preferred=20),
    Column("WAITING", 0, right=True),
    Column("LONGEST", 2, right=True),
    Column("HOLDER", 1, least=12, preferred=24),
    Column("ID", 5),
    Column("HELD FOR", 3, right=True),
    Column("HOLDERS", 4, right=True),
)
WAITS = (
    Column("WAITER", 0, least=12, preferred=28),
    Column("ID", 6),
    Column("WAITS", 0, right=True),
    Column("BLOCKER", 0, least=12, preferred=28),
    Column("ID", 5),
    Column("MORE", 3, right=True),
    Column("RESOURCE", 0, least=12, preferred=20),
    Column("STATE", 4),
    Column("FOR", 2, right=True),
)
"""Ids go first where room is short: operators know transactions by their names, and a request without has its id there."""
HOT = (
    Column("RESOURCE", 0, least=20),
    Column("WAITED", 0, right=True),
    Column("COLLISIONS", 2, right=True),
    Column("WAITING", 1, right=True),
    Column("HOLDERS", 3, right=True),
)


class Line(NamedTuple):
    """A line of the screen. Its text is shown as it is; the style is one of the above."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the admin port told; the locks only of a server that leads."""

    state: State
    waits: Waits | None = None
    hot: HotList | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A table with its title, or the `note` where it has no rows. There are `total` rows, of which it has the first."""

    title: str
    columns: Sequence[Column]
    rows: list[list[str]]
    note: str
    total: int
    incomplete: str = ""

    def lines(self, most: int, room: int) -> Iterator[Line]:
        """At most so many rows, behind an empty line."""
        yield Line("")
        if not self.rows:
            yield Line(clip(self.note, room), DIM)
            return
        shown = self.rows[:most]
        of = "" if len(shown) == self.total else f" ({len(shown):,} of {self.total:,})"
        yield Line(clip(f"{self.title}{of}{self.incomplete}", room), BOLD)
        header, *rows = fitted(self.columns, shown, room)
        yield Line(header, DIM)
        yield from map(Line, rows)

    @property
    def beside_rows(self) -> int:
        """Lines that are no rows."""
        return 3 if self.rows else 2


def picture(seen: Seen, columns: int, rows: int | None, *hints: str) -> list[Line]:
    """Lines of at most so many columns, and at most `rows` of them if that is given. `hints` stand at the top."""
    lines = [*_head(seen.state, columns, hints), *_trouble(seen.state, columns)]
    if seen.waits is not None and seen.hot is not None:
        parts = [_lines(seen), _waits(seen.waits, seen.state.now), _hot(seen.hot)]
        if not seen.state.waiting and not seen.waits.nodes:
            del parts[1]  # it would say once more that nobody waits
        room = None if rows is None else rows - len(lines)
        for part, most in _shares(parts, room):
            lines += part.lines(most, columns)
    return lines[:rows]


def _shares(parts: list[Part], room: int | None) -> Iterator[tuple[Part, int]]:
    """The parts for which there is room, and how many rows each has. The last ones go first."""
    wanted = [min(MOST, len(part.rows)) for part in parts]
    if room is None:
        yield from zip(parts, wanted, strict=True)
        return
    while parts and room < sum(part.beside_rows + min(1, len(part.rows)) for part in parts):
        parts = parts[:-1]
    left = room - sum(part.beside_rows for part in parts)
    shares = [0] * len(parts)
    while left > 0 and any(share < want for share, want in zip(shares, wanted, strict=False)):
        for i, share in enumerate(shares):
            if left > 0 and share < wanted[i]:
                shares[i] += 1
                left -= 1
    yield from zip(parts, shares, strict=True)


def _head(state: State, columns: int, hints: Sequence[str]) -> Iterator[Line]:
    who = [f"genie {state.version}", state.role, f"namespace {state.namespace}", f"store {state.store}"]
    for line in wrapped([*who, f"up {duration(state.uptime)}", *hints], columns):
        yield Line(line, BOLD)
    if len(state.namespaces) > 1:
        roles = [f"{each.namespace} {each.role}" for each in state.namespaces]
        yield from map(Line, wrapped(["namespaces", *roles], columns))
    p50, p99 = (_quantile(wait) for wait in (state.wait_p50, state.wait_p99))
    numbers = [
        *[f"locks {state.locks:,}", f"held {state.held:,}", f"waiting {state.waiting:,}"],
        *[f"longest wait {duration(state.longest_wait)}", f"wait p50 {p50}", f"p99 {p99}"],
        *[f"connections {state.connections:,}", f"sessions {state.sessions:,}"],
    ]
    rates = state.rates
    each = {name: getattr(rates, name) for name in ("grants", "releases", "waits", "timeouts", "deadlocks", "errors")}
    yield from map(Line, wrapped(numbers, columns))
    yield from map(Line, wrapped([f"{name} {_rate(rate)}/s" for name, rate in each.items()], columns))


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if 0 < rate < SMALL else f"{rate:,.0f}"


def _quantile(wait: float | None) -> str:
    return "-" if wait is None else f"{wait:.1f} ms" if wait < SMALL else duration(wait)


def _trouble(state: State, columns: int) -> Iterator[Line]:
    troubles = []
    if not state.store_reached:
        troubles.append("The store does not answer.")
    if state.role != LEADER:
        troubles.append(
            f"This server does not lead ({state.role}), "
            + (f"{state.leader} does: ask the admin port there." if state.leader else "and knows of none that does.")
        )
    for trouble in troubles:
        yield from (Line(line, BAD) for line in wrapped(trouble.split(), columns, " "))


def _lines(seen: Seen) -> Part:
    """The longest lines. How long a holder holds is known of those that stand in somebody's way."""
    state, since = seen.state, {}
    if seen.waits is not None:
        since = {node.id: node.since for node in seen.waits.nodes if node.state == "held"}
    rows = [
        [
            line.resource,
            f"{line.waiting:,}",
            duration(state.now - line.since),
            "-" if line.holder is None else _called(line.holder, line.transaction_name),
            "-" if line.holder is None else str(line.holder),
            duration(state.now - since[line.holder]) if line.holder in since else "-",
            f"{line.holders:,}",
        ]
        for line in state.lines
    ]
    incomplete = "" if state.lines_complete else ", of those who came first"
    return Part("Longest lines", LINES, rows, "Nobody waits.", len(rows), incomplete)


def _waits(waits: Waits, now_ms: float) -> Part:
    """Who waits longest, each with the first that is in its way."""
    nodes = {node.id: node for node in waits.nodes}
    edges: dict[int, list[Edge]] = {}
    for edge in waits.edges:
        edges.setdefault(edge.waiter, []).append(edge)
    rows = []
    for node in sorted((node for node in waits.nodes if node.state == "queued"), key=lambda node: node.since):
        who = [_called(node.id, node.transaction_name), str(node.id), duration(now_ms - node.since)]
        if node.id not in edges:
            rows.append([*who, "-", "-", "", *node.resources[:1], *["-"] * (3 - len(node.resources[:1]))])
            continue
        first, *others = edges[node.id]
        more = max(len(others), (node.blockers_total or 0) - 1)
        blocker = nodes.get(first.blocker)
        rows.append(
            [
                *who,
                _called(first.blocker, blocker.transaction_name if blocker else None),
                str(first.blocker),
                f"+{more:,}" if more else "",
                *[f"{first.mode}:{first.resource}", first.state, duration(now_ms - first.since)],
            ]
        )
    return Part("Who waits longest, and for whom", WAITS, rows, "Nobody waits.", waits.queue_total)


def _called(id_: int, transaction: str | UnsetType | None) -> str:
    """A request by the name of its transaction, else by its id."""
    return transaction or f"#{id_}"


def _hot(hot: HotList) -> Part:
    rows = [
        [row.resource, duration(row.waited), f"{row.collisions:,}", f"{row.waiting:,}", f"{row.holders:,}"]
        for row in hot.resources
    ]
    return Part("Hot within the last minutes", HOT, rows, "Nothing was fought for within the last minutes.", len(rows))
