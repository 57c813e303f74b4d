"""The documentation site builds in strict mode, and its pages load nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

EXTERNAL = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_in_strict_mode(site: Path) -> None:
    assert (site / "index.html").is_file()
    assert (site / "reference/protocol.html").is_file()


def test_the_site_has_no_compiled_python(site: Path) -> None:
    assert not [path for path in site.rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"]


def test_the_command_says_how_to_serve_the_search() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "docs"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "python -m http.server --bind 127.0.0.1 --directory build/site" in printed


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    assert pages
    for page in pages:
        found = EXTERNAL.search(page.read_text())
        assert found is None, f"{page.relative_to(site)}: {found and found[0]}"


def test_the_python_reference_documents_every_public_class(site: Path) -> None:
    reference = (site / "reference/python.html").read_text()
    for name in (
        "connect",
        "Client",
        "Client.acquire_any",
        "Lock.detach",
        "Inspection",
        "sync.Client",
        "sql.FencedTable",
    ):
        assert f'id="genie.{name}"' in reference, name


def test_a_redirect_of_a_link_outside_docs_leads_to_a_file_of_the_site(site: Path) -> None:
    assert (site / "files/deploy/compose-ha.yml").read_bytes() == (ROOT / "deploy/compose-ha.yml").read_bytes()
