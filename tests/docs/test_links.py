"""No page points to what is not there."""

from __future__ import annotations

import re

import pytest
from pages import DOCUMENTATION, ROOT, anchors, links, prose

from genie.version import VERSION

PAGES = (
    *DOCUMENTATION,
    "protocol.md",
    "CHANGELOG.md",
    "conformance/README.md",
    "genie/core/README.md",
    "genie/storage/README.md",
    "simulator/README.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        assert "://" not in link, f"{page}: {link} leaves the project, and is not checked"
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_file(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(target.relative_to(ROOT))), f"{page}: {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(("genie/", "simulator/"))])
def test_files_that_are_named_exist(page: str) -> None:
    # The reader creates the programs that a page asks to save.
    text = re.sub(r"Save the program as `[\w.]+`", "", "\n".join(prose(page)))
    for name in re.findall(r"(?<![\w/])([\w./-]+\.(?:md|py|yml|toml)|Dockerfile|Makefile|LICENSE)\b", text):
        places = [folder / name for folder in (ROOT, (ROOT / page).parent, (ROOT / page).parents[1])]
        assert any(place.exists() for place in places), f"{page}: {name}"


def test_the_changelog_begins_with_this_version() -> None:
    versions = [line.removeprefix("## ") for line in prose("CHANGELOG.md") if line.startswith("## ")]
    assert versions[0].split()[0] == VERSION


def test_the_licence_is_the_one_that_is_said() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert licence.startswith("MIT License\n")
    assert "The Genie authors" in licence
    assert 'license = "MIT"' in (ROOT / "pyproject.toml").read_text()
