"""The tools of a release: links of the README, checksums, the locked packages."""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import release

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/a/b"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("[a](docs/x.md)", "[a](https://github.com/a/b/blob/v1/docs/x.md)"),
        ("[a](docs/x.md#part)", "[a](https://github.com/a/b/blob/v1/docs/x.md#part)"),
        (
            "[a\nb](docs/x.md), [c](LICENSE)",
            "[a\nb](https://github.com/a/b/blob/v1/docs/x.md), [c](https://github.com/a/b/blob/v1/LICENSE)",
        ),
        ("![a](docs/x.png)", "![a](https://raw.githubusercontent.com/a/b/v1/docs/x.png)"),
        ("[a](#part) [b](https://c.example/d)", "[a](#part) [b](https://c.example/d)"),
        ("```python\nx[0](y)\n```", "```python\nx[0](y)\n```"),
    ],
)
def test_relative_links_become_absolute(given: str, expected: str) -> None:
    assert release.with_absolute_links(given, REPOSITORY, "1") == expected


@pytest.mark.parametrize("folder", release.SOURCES)
def test_the_readme_of_a_release_has_no_relative_link_and_names_existing_files(folder: str) -> None:
    readme = (ROOT / folder / "README.md").read_text()
    readme = release.with_absolute_links(readme, **release.project(), folder=folder)
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^```.*?^```$", "", readme))
    assert targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    prefix = re.compile(rf".*/(?:blob/)?v{re.escape(release.project()['version'])}/")
    for target in targets:
        if target.startswith("https://"):
            assert (ROOT / prefix.sub("", target).partition("#")[0]).is_file(), target


def test_checksums_are_those_of_all_files_but_themselves(tmp_path: Path) -> None:
    for name in ("b.whl", "a.tar.gz", "SHA256SUMS"):
        (tmp_path / name).write_text(name)
    digests = [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}" for name in ("a.tar.gz", "b.whl")]
    assert release.checksums(tmp_path).splitlines() == digests


@pytest.mark.parametrize("folder", release.SOURCES)
def test_the_sources_of_a_release_are_those_of_the_sdist(folder: str) -> None:
    targets = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert set(targets["sdist"]["include"]) <= set(release.SOURCES[folder])
    assert all((ROOT / folder / name).exists() for name in release.SOURCES[folder])


def test_each_application_is_released() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("applications/*/pyproject.toml")}
    assert folders == {*release.SOURCES} - {release.LOCK_SERVER}
    assert {f"genie_{Path(folder).name}" for folder in folders} == {*release.TRIALS}


def test_the_tag_of_a_release_is_that_of_its_version() -> None:
    release.check_tag(f"v{release.project()['version']}")
    with pytest.raises(SystemExit, match="the tag of this version is v"):
        release.check_tag("v0.9.0")


def test_without_a_docker_engine_the_image_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert release.build_image() == "image: not built, because no Docker engine runs here"
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    assert release.build_image() == "image: not built, because no Docker engine runs here"


# -- the lock file --------------------------------------------------------------------------------------------


IMAGE = {
    ".": ["server"],
    "applications/tokens": ["sqlite", "postgres"],
    "applications/ledger": ["sqlite", "postgres", "mysql"],
}
"""The projects that the image contains, each with the extras whose requirements are locked."""
LOCKS = {"requirements.lock": IMAGE, "requirements-build.lock": IMAGE | {".": ["server", "sql", "compile"]}}


def locked(file: str) -> dict[str, str]:
    """Return the entry of each locked package, with its hashes."""
    entries = re.split(r"^(?=[a-z0-9])", (ROOT / file).read_text(), flags=re.MULTILINE)
    return {re.split("==", entry)[0]: entry for entry in entries if "==" in entry}


@pytest.mark.parametrize("file", LOCKS)
def test_every_requirement_is_locked(file: str) -> None:
    for folder, extras in LOCKS[file].items():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        optional = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
        for requirement in project["dependencies"] + optional:
            name = re.match(r"[\w-]+", requirement)
            assert name
            assert name[0] == "genie-lock" or name[0] in locked(file), "make lock"


def test_the_image_is_built_with_the_versions_that_it_has() -> None:
    """mypyc checks the types of the dependencies."""
    built_with, installed = locked("requirements-build.lock"), locked("requirements.lock")
    assert {name: built_with[name].split()[0] for name in installed} == {
        name: entry.split()[0] for name, entry in installed.items()
    }


@pytest.mark.parametrize("file", LOCKS)
def test_every_locked_package_has_a_version_and_hashes_and_no_address(file: str) -> None:
    assert locked(file)
    for name, entry in locked(file).items():
        assert re.match(rf"{name}==[\w.]+ ", entry)
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)
        assert "://" not in entry
    assert not re.search(r"^(?:--|-[a-z])", (ROOT / file).read_text(), re.MULTILINE)
