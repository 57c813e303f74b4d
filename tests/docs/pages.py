"""Parse the pages of the documentation: fenced blocks, tables, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from genie import GenieError

ROOT = Path(__file__).parents[2]
DOCUMENTATION = (
    "README.md",
    *sorted(
        path.relative_to(ROOT).as_posix()
        for pattern in ("docs/**/*.md", "applications/*/README.md", "applications/*/docs/*.md")
        for path in ROOT.glob(pattern)
    ),
)
"""The pages with examples that are executed by test_examples.py."""
FENCE = re.compile(r"^ *```(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its start, its language, and its lines."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> list[str]:
    return (ROOT / page).read_text(encoding="utf-8").splitlines()


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    start, language, lines = 0, "", list[str]()
    for number, line in enumerate(read(page), 1):
        fence = FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif not start:
            start, language, lines = number, fence[1].strip(), []
        else:
            assert not fence[1], f"{page}:{number}: a block within a block"
            found.append(Block(page, start, language, tuple(lines)))
            start = 0
    assert not start, f"{page}:{start}: a block without an end"
    return found


def prose(page: str) -> list[str]:
    """Return the lines outside of fenced blocks."""
    inside, found = False, []
    for line in read(page):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            found.append(line)
    return found


def tables(page: str, *headers: str) -> list[list[dict[str, str]]]:
    """Return the rows of each table that starts with these headers."""
    rows: list[list[str]] = []
    found = []
    for line in [*prose(page), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif rows:
            head, rule, *body = rows
            rows = []
            if tuple(head[: len(headers)]) != headers:
                continue
            assert all(set(cell) <= set("-: |") for cell in rule)
            for row in body:
                assert len(row) == len(head), f"{page}: {row} does not have the columns {head}"
            found.append([dict(zip(head, row, strict=True)) for row in body])
    return found


def table(page: str, *headers: str) -> list[dict[str, str]]:
    """Return the rows of the only table that starts with these headers."""
    (found,) = tables(page, *headers)
    return found


def code(cell: str) -> str:
    """Return a cell without its backticks."""
    return cell.strip("`")


def number(text: str) -> int:
    """Parse a number with thousands separators."""
    return int(text.replace(",", ""))


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub generates from the headings of a page."""
    found = set()
    for line in prose(page):
        if line.startswith("#"):
            title = line.lstrip("#").strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


def links(page: str) -> list[str]:
    """Return the targets of all links."""
    return re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page)))


def errors_of(package: ModuleType) -> set[str]:
    """Return the names of the exceptions that a package exports."""
    return {
        name
        for name in package.__all__
        if isinstance(exported := getattr(package, name), type) and issubclass(exported, GenieError)
    }
