"""The workflows in .github: what they run exists, what they use is pinned, and they have no permission without a need."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]
TAG_OF_THE_GO_MODULE = (
    'version=$(echo "$TAG" | sed s/rc/-rc./) && '
    'gh api "repos/$GH_REPO/git/refs" -f ref="refs/tags/clients/go/$version" -f sha="$GITHUB_SHA"'
)
WITHOUT_A_CHECKOUT = {
    "mkdir dist && mv build/*.whl build/*.tar.gz dist/",
    'npm publish build/*.tgz --provenance --access public --tag "$DIST_TAG"',
    'gh release create "$TAG" --verify-tag --generate-notes build/*',
    TAG_OF_THE_GO_MODULE,
}
"""The commands that are no make targets: their jobs have extensive permissions, and so run no code of the repository."""
PINNED = re.compile(
    r"[\w.-]+/[\w.-]+(?:/[\w.-]+)*@(?:v\d+|release/v\d+|[0-9a-f]{40})|\./\.github/workflows/[\w-]+\.yml"
)
WRITING = {
    ("release.yml", "archives"): {"id-token", "attestations"},
    ("release.yml", "pypi"): {"id-token"},
    ("release.yml", "npm"): {"id-token"},
    ("release.yml", "image"): {"packages", "id-token", "attestations"},
    ("release.yml", "github"): {"contents"},
    ("release.yml", "go"): {"contents"},
    ("docs.yml", "deploy"): {"pages", "id-token"},
}
"""The permissions to write, by job. All other jobs only read the repository."""


def steps(workflow: str, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = WORKFLOWS[workflow]["jobs"][job].get("steps", [])
    return found


def test_the_workflows_are_there() -> None:
    assert WORKFLOWS.keys() == {"ci.yml", "docs.yml", "release.yml", "wheels.yml"}


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_a_job_runs_make_targets_that_exist(workflow: str, job: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    matrix = WORKFLOWS[workflow]["jobs"][job].get("strategy", {}).get("matrix", {})
    for step in steps(workflow, job):
        command = step.get("run", "")
        assert "${{" not in command, "a value could contain shell commands: use env"
        if command and command not in WITHOUT_A_CHECKOUT:
            made = re.fullmatch(r'make "?([\w-]+?)(?:-?\$CLIENT)?"?', command)
            assert made, command
            named = {f"{made[1]}-{client}" for client in matrix["client"]} if "$CLIENT" in command else {made[1]}
            assert named <= targets, command


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_actions_are_pinned_and_keep_no_credentials(workflow: str, job: str) -> None:
    for step in [*steps(workflow, job), WORKFLOWS[workflow]["jobs"][job]]:
        if "uses" in step:
            assert PINNED.fullmatch(step["uses"]), step["uses"]
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_a_job_has_no_permission_without_a_need(workflow: str, job: str) -> None:
    assert WORKFLOWS[workflow]["permissions"] in ({}, {"contents": "read"})
    permissions = WORKFLOWS[workflow]["jobs"][job].get("permissions", {})
    writing = {name for name, level in permissions.items() if level == "write"}
    assert writing == WRITING.get((workflow, job), set())
    assert {permissions[name] for name in permissions.keys() - writing} <= {"read"}


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_a_job_that_does_not_call_a_workflow_has_a_time_limit(workflow: str, job: str) -> None:
    found = WORKFLOWS[workflow]["jobs"][job]
    assert ("timeout-minutes" in found) != ("uses" in found)


def test_all_supported_versions_of_python_are_tested_and_get_compiled_wheels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    classified = [re.search(r":: (3\.\d+)$", one) for one in project["project"]["classifiers"]]
    supported = [found[1] for found in classified if found]
    assert WORKFLOWS["ci.yml"]["jobs"]["check"]["strategy"]["matrix"]["python"] == supported
    identifiers = " ".join(f"cp{version.replace('.', '')}-*" for version in supported)
    assert project["tool"]["cibuildwheel"]["build"] == identifiers


@pytest.mark.parametrize(("tag", "tag_of_the_module"), [("v1.0.0rc1", "v1.0.0-rc.1"), ("v1.2.3", "v1.2.3")])
def test_the_tag_of_the_go_module_is_a_semantic_version(tmp_path: Path, tag: str, tag_of_the_module: str) -> None:
    gh = tmp_path / "gh"
    gh.write_text('#!/bin/sh\necho "$@"\n')
    gh.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TAG": tag, "GH_REPO": "a/b", "GITHUB_SHA": "abc"}
    (step,) = steps("release.yml", "go")
    output = subprocess.run(
        ["sh", "-c", step["run"]], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert output == f"api repos/a/b/git/refs -f ref=refs/tags/clients/go/{tag_of_the_module} -f sha=abc\n"


def test_all_supported_stores_are_tested() -> None:
    images = WORKFLOWS["ci.yml"]["jobs"]["store"]["strategy"]["matrix"]["image"]
    tested = [re.split(r"[:/]", image)[0] + " " + re.split(r"[:-]", image)[1] for image in images]
    assert tested == ["redis 6.2", "redis 7.4", "redis 8.0", "valkey 8.0"]
