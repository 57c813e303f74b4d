"""MkDocs hooks: publish files from outside docs/ and make links to them work both on the site and in the repository.

Pages link to files as the repository has them (`../../protocol.md`, `../../deploy/compose-ha.yml`), so that they can also
be read there. `PAGES` become pages of the site; any other file that a page links to is copied to `files/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "protocol.md": "reference/protocol.md",
    "genie/core/README.md": "concepts/lock-manager.md",
    "genie/storage/README.md": "concepts/store.md",
    "simulator/README.md": "concepts/simulator.md",
    "clients/typescript/README.md": "reference/typescript.md",
    "clients/go/README.md": "reference/go.md",
    "clients/java/README.md": "reference/java.md",
    "conformance/README.md": "reference/conformance.md",
    "applications/ledger/README.md": "applications/ledger.md",
    "applications/ledger/docs/ledger-timeouts.md": "applications/ledger-timeouts.md",
    "applications/tokens/README.md": "applications/tokens.md",
    "applications/tokens/docs/token-selection.md": "applications/token-selection.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "README.md": "index.md",
}
"""Pages outside docs/: path in the repository, path on the site."""
SITE_ROOTED = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^ *```")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and every file outside docs/ that some page links to."""
    for source, target in PAGES.items():
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for file in list(files.documentation_pages()):
        for _, target in _links(file):
            path = _repository_path(file, target)
            if (
                path is not None
                and _site_path(path) == f"files/{path}"
                and files.get_file_from_path(f"files/{path}") is None
            ):
                files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's paths."""
    del config, files
    lines, inside = [], False
    for line in markdown.split("\n"):
        inside ^= FENCE.match(line) is not None
        lines.append(line if inside else SITE_ROOTED.sub(lambda found: _rewritten(page.file, found), line))
    return "\n".join(lines)


def _links(file: File) -> list[tuple[str, str]]:
    return [(found[1], found[2]) for found in SITE_ROOTED.finditer(file.content_string)]


def _rewritten(file: File, found: re.Match[str]) -> str:
    path = _repository_path(file, found[2])
    if path is None:
        return found[0]
    here = posixpath.dirname(file.src_uri)
    return f"{found[1]}{posixpath.relpath(_site_path(path), here or '.')}{found[3]}"


def _repository_path(file: File, target: str) -> str | None:
    """The file that a link leads to, from the root of the repository; None for URLs."""
    if "://" in target or file.abs_src_path is None:
        return None
    path = (Path(file.abs_src_path).parent / target).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_file() and path.is_relative_to(ROOT) else None


def _site_path(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"
