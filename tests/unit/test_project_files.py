"""The files about the project agree with each other: version, address of the repository, supported versions of Python."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from genie.version import VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = ("SECURITY.md", "CONTRIBUTING.md", ".github/pull_request_template.md", "docs/reference/support.md")
APPLICATIONS = sorted(path.parent for path in ROOT.glob("applications/*/pyproject.toml"))
NAMING_THE_REPOSITORY = ("SECURITY.md", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")


@pytest.mark.parametrize("folder", APPLICATIONS, ids=lambda folder: folder.name)
def test_an_application_has_the_version_the_licence_and_the_addresses_of_the_lock_server(folder: Path) -> None:
    application = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert application["name"] == f"genie-{folder.name}"
    assert application["version"] == VERSION
    assert f"genie-lock>={VERSION},<{int(VERSION.partition('.')[0]) + 1}" in application["dependencies"]
    for key in ("urls", "license", "requires-python", "authors"):
        assert application[key] == PROJECT[key]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", NAMING_THE_REPOSITORY)
def test_the_address_of_the_repository_is_the_one_of_the_project(name: str) -> None:
    addresses = re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / name).read_text())
    assert addresses
    assert set(addresses) == {PROJECT["urls"]["Repository"]}


def test_the_citation_has_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (VERSION, PROJECT["license"])


def test_the_module_of_the_go_client_is_a_folder_of_the_repository_and_has_this_version() -> None:
    module = (ROOT / "clients/go/go.mod").read_text().split()[1]
    assert f"https://{module}" == f"{PROJECT['urls']['Repository']}/clients/go"
    assert f'"genie-go/{VERSION.replace("rc", "-rc.")}"' in (ROOT / "clients/go/wire.go").read_text()


def test_the_artifact_of_the_java_client_has_this_version_the_licence_and_the_address() -> None:
    folder = ROOT / "clients/java"
    version = VERSION.replace("rc", "-rc.")
    for name in ("pom.xml", "README.md"):
        assert f"<version>{version}</version>" in (folder / name).read_text()
    assert f'"genie-java/{version}"' in (folder / "src/main/java/dev/genielock/Wire.java").read_text()
    assert f"<url>{PROJECT['urls']['Repository']}</url>" in (folder / "pom.xml").read_text()
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_package_of_the_typescript_client_names_the_repository_and_has_this_version() -> None:
    folder = ROOT / "clients/typescript"
    package, lock = (json.loads((folder / name).read_text()) for name in ("package.json", "package-lock.json"))
    version = VERSION.replace("rc", "-rc.")
    assert [package["version"], lock["version"], lock["packages"][""]["version"]] == [version] * 3
    assert f"'genie-typescript/{version}'" in (folder / "src/session.ts").read_text()
    assert package["repository"]["url"] == f"git+{PROJECT['urls']['Repository']}.git"
    assert (ROOT / package["repository"]["directory"] / "package.json").is_file()
    assert (package["homepage"], package["bugs"]) == (PROJECT["urls"]["Documentation"], PROJECT["urls"]["Issues"])


def test_the_supported_versions_of_python_are_those_of_the_package() -> None:
    listed = re.findall(r"^\| (3\.\d+) \|", (ROOT / "docs/reference/support.md").read_text(), re.MULTILINE)
    classified = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert listed == classified
    assert PROJECT["requires-python"] == f">={listed[0]}"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_make_targets_of_the_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)\s#]+)", text):
        assert ((ROOT / page).parent / link).exists(), link
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets


@pytest.mark.parametrize("form", ["defect", "proposal"])
def test_the_fields_of_an_issue_form_have_unique_ids_and_labels(form: str) -> None:
    body = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())["body"]
    assert len({field["id"] for field in body}) == len(body)
    assert all(field["attributes"]["label"] for field in body)
