"""The navigation of the site: short levels, developers first, and the titles of the pages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import yaml
from pages import ROOT


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, without the Python objects that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
CONFIGURATION = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # noqa: S506 - makes no Python objects
MAX_ENTRIES = 9


def levels(entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    yield entries
    for entry in entries:
        for value in entry.values():
            if isinstance(value, list):
                yield from levels(value)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the title and the path of each page, in the order of the navigation."""
    for title, value in (item for level in levels(CONFIGURATION["nav"]) for entry in level for item in entry.items()):
        if isinstance(value, str):
            yield title, value


def source(page: str) -> str:
    """Return the text of a page of the site, which may be a file outside of docs/."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    files = {target: path for path, target in hooks.PAGES.items()}
    return (ROOT / files.get(page, f"docs/{page}")).read_text()


def test_each_level_has_at_most_nine_entries() -> None:
    for level in levels(CONFIGURATION["nav"]):
        assert len(level) <= MAX_ENTRIES, level


def test_each_title_is_that_of_its_page() -> None:
    for title, page in pages():
        (heading, *_) = [line for line in source(page).splitlines() if line.startswith("# ")]
        assert heading.removeprefix("# ") == title, page


def test_pages_for_developers_come_before_those_for_operators() -> None:
    sections = [next(iter(entry)) for entry in CONFIGURATION["nav"]]
    assert sections.index("Recipes") < sections.index("Guides for developers") < sections.index("Guides for operators")
