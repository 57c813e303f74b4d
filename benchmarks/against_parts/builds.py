"""The two builds to compare: each is a folder with the package `genie`, pure Python or compiled."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "against"
SOURCES = ("genie", "pyproject.toml", "README.md", "LICENSE")
"""What a wheel is built from."""


@dataclass(frozen=True)
class Build:
    """A build of the server."""

    title: str
    folder: Path
    """Contains the package `genie`."""

    @property
    def kind(self) -> str:
        """True if the package is compiled."""
        return "compiled" if any(self.folder.joinpath("genie").rglob("*.so")) else "pure Python"


def of_commit(revision: str, *, compiled: bool) -> Build:
    """Extract a commit, and compile it if wanted. Raises SystemExit if there is no such commit."""
    found = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", check=False).stdout.decode().strip()
    if not found:
        raise SystemExit(f"{revision!r} is no commit of this repository")
    folder = _empty(FOLDER / found[:12])
    with tarfile.open(fileobj=io.BytesIO(_git("archive", found, *SOURCES).stdout)) as archive:
        archive.extractall(folder, filter="data")
    subject = _git("log", "-1", "--format=%h %s", found).stdout.decode().strip()
    return Build(subject, _compiled(folder) if compiled else folder)


def of_working_tree(*, compiled: bool) -> Build:
    """Copy the working tree, with changes that are not committed, and compile it if wanted."""
    folder = _empty(FOLDER / "working-tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, folder)
    changed = ", with uncommitted changes" if _git("status", "--porcelain", "--", *SOURCES).stdout else ""
    subject = _git("log", "-1", "--format=%h %s").stdout.decode().strip() + changed
    return Build(subject, _compiled(folder) if compiled else folder)


def _git(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=check)  # noqa: S607


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _compiled(source: Path) -> Path:
    """Build the compiled wheel of a source folder, and extract it. Raises SystemExit if it cannot be built."""
    wheels = _empty(source.with_name(f"{source.name}-wheel"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_MYPYC": "true"}
    process = subprocess.run(
        [*command, "--wheel-dir", str(wheels), str(source)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{source.name} cannot be compiled:\n{process.stdout}")
    folder = _empty(source.with_name(f"{source.name}-compiled"))
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(folder)  # noqa: S202 - built above
    return folder
