"""Builds a release in build/release/dist, and checks it: `make release`.

A release consists of three distributions, the lock server and two applications, a software bill of materials (CycloneDX)
of what the image installs, and SHA256SUMS. Each distribution has an sdist and a pure wheel, which is built from the sdist.
The lock server also has a wheel for this platform whose hot modules are compiled. Where a Docker engine runs, the image is
built, too. Each archive is installed into an environment of its own, in which it is tried: with the lock server a first lock
is taken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/release"
DIST = WORK / "dist"
LOCK_SERVER = "."
SOURCES = {
    LOCK_SERVER: ("genie", "pyproject.toml", "README.md", "LICENSE", "protocol.md", "CHANGELOG.md"),
    "applications/tokens": ("genie_tokens", "pyproject.toml", "README.md", "LICENSE"),
    "applications/ledger": ("genie_ledger", "pyproject.toml", "README.md", "LICENSE"),
}
"""The files and folders of each distribution, by the folder of its project."""
LINK = re.compile(r"(!?)(\[(?:[^\]]|\n)*\]\()([^)\s#:]+)(#[^)\s]*)?\)")
FIRST_LOCK = """
import asyncio, sys, genie, genie.build
async def main():
    async with genie.connect("127.0.0.1", int(sys.argv[1])) as client:
        async with client.lock("exclusive:accounts/2", transaction="transfer-42") as lock:
            print(lock.id, lock.fence, genie.build.IS_COMPILED, genie.__version__)
asyncio.run(main())
"""
TRIALS = {
    "genie_tokens": """
import asyncio
from genie_tokens import InMemorySelector, MemoryTokenStore, Token
async def main():
    store, kind = MemoryTokenStore(), {"token_type": "Fiat", "identifier": "CHF"}
    await store.add([Token("t", "alice", amount=50, **kind)])
    async with InMemorySelector(store) as selector:
        async with await selector.select(20, owner="alice", transaction="payment", **kind) as selection:
            print("selected", selection.amount)
asyncio.run(main())
""",
    "genie_ledger": """
import subprocess, sys
from pathlib import Path
genie_ledger = (Path(sys.executable).with_name("genie-ledger"), "--database", "sqlite:///ledger.db")
for command in (["generate", "--transfers", "100", "--expired", "1"], ["run", "--once"]):
    program, *database = genie_ledger
    done = subprocess.run([program, *command, *database], check=True, capture_output=True, text=True)
print("expired", done.stdout.count("transferId"))
""",
}
"""What each application is tried with, by its package."""


def project() -> dict[str, str]:
    """Return the version and the address of the repository."""
    text = (ROOT / "genie/version.py").read_text()
    version = re.search(r'VERSION: Final = "([^"]+)"', text)
    if version is None:
        sys.exit("genie/version.py has no version")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    return {"version": version[1], "repository": urls["Repository"]}


def with_absolute_links(markdown: str, repository: str, version: str, folder: str = ".") -> str:
    """Point relative links at the files of the tagged version: PyPI shows the README without the repository.

    `folder` is that of the page in the repository.
    """

    def absolute(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        base = repository.replace("github.com", "raw.githubusercontent.com") if image else f"{repository}/blob"
        return f"{image}{text}{base}/v{version}/{path}{anchor or ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(absolute, part) for part in parts)


def checksums(folder: Path) -> str:
    """Return a line for each file of the folder, in the format of sha256sum."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def run(*command: str | Path, **environment: str) -> None:
    """Run a program, and end if it fails."""
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=os.environ | environment, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}")


def build_sdist(folder: str) -> Path:
    """Build the sdist of a project from a copy of its sources, in which the links of the README are absolute."""
    source = WORK / "source" / folder
    source.mkdir(parents=True)
    for name in SOURCES[folder]:
        if (ROOT / folder / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / folder / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / folder / name, source / name)
    readme = source / "README.md"
    readme.write_text(with_absolute_links(readme.read_text(), **project(), folder=folder))
    before = {*DIST.glob("*.tar.gz")}
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, source)
    (sdist,) = {*DIST.glob("*.tar.gz")} - before
    return sdist


def build_wheels(sdist: Path, *, compiled: bool) -> None:
    """Build the pure wheel, and the compiled wheel for this platform."""
    for hook in ("false", "true") if compiled else ("false",):
        wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", DIST)
        run(*wheel, sdist, HATCH_BUILD_HOOK_ENABLE_MYPYC=hook)


def write_bill_of_materials(python: Path) -> None:
    """Write the bill of materials of an environment in which a wheel and the locked packages are installed."""
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip")
    path = DIST / f"genie-lock-{project()['version']}.cdx.json"
    cyclonedx = (sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml")
    run(*cyclonedx, "--output-reproducible", "--of", "JSON", "-o", path, python)
    bill = json.loads(path.read_text())
    bill["metadata"]["component"]["version"] = project()["version"]  # pyproject.toml has none, because it is dynamic
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    for component in bill["components"]:
        name = re.sub(r"[-_.]+", "-", component["name"]).lower()
        if locked.get(name) != component["version"]:
            sys.exit(f"{name} {component['version']} is installed, but requirements.lock has {locked.get(name)}")
    path.write_text(json.dumps(bill, indent=2) + "\n")


def build_image() -> str:
    """Build the image, and return what was built or why not."""
    engine = shutil.which("docker")
    if engine is None or subprocess.run([engine, "info"], capture_output=True, check=False).returncode:
        return "image: not built, because no Docker engine runs here"
    tag = f"genie:{project()['version']}"
    run(engine, "build", "--tag", tag, ".")
    return f"image: {tag}"


def check(archive: Path) -> str:
    """Install an archive into an environment of its own, start a server, and take a first lock."""
    start = time.monotonic()
    python = environment_with(archive, f"genie-lock[server] @ {archive.as_uri()}")
    serve = (python.with_name("genie"), "serve", "--port", "0", "--admin-port", "0")
    with subprocess.Popen(serve, cwd=WORK, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            port = listening_port(server)
            lock = subprocess.run(
                [python, "-c", FIRST_LOCK, str(port)], cwd=WORK, check=True, capture_output=True, text=True, timeout=60
            )
        finally:
            server.terminate()
            server.communicate(timeout=30)
    status = server.returncode
    id_, fence, is_compiled, version = lock.stdout.split()
    is_built_compiled = "-none-any" not in archive.name and archive.suffix == ".whl"
    if (version, is_compiled, status) != (project()["version"], str(is_built_compiled), 0):
        sys.exit(f"{archive.name}: version {version}, compiled {is_compiled}, the server's exit status {status}")
    return f"{archive.name}: lock {id_}, fence {fence}, {time.monotonic() - start:.0f} s after the start of the install"


def check_application(archive: Path, lock_server: Path) -> str:
    """Install an archive of an application into an environment of its own, with the wheel of the lock server, and try it."""
    package = archive.name.partition("-")[0]
    extra = "[sqlite]" if package == "genie_ledger" else ""
    name = package.replace("_", "-")
    python = environment_with(archive, f"genie-lock @ {lock_server.as_uri()}", f"{name}{extra} @ {archive.as_uri()}")
    trial = subprocess.run(
        [python, "-c", TRIALS[package]], cwd=python.parent, capture_output=True, text=True, check=False
    )
    if trial.returncode:
        sys.exit(f"{archive.name}: {trial.stderr}")
    return f"{archive.name}: {trial.stdout.strip()}"


def environment_with(archive: Path, *requirements: str) -> Path:
    """Make the environment of an archive, with the locked packages and these requirements. Returns its Python."""
    python = interpreter(archive)
    run(sys.executable, "-m", "venv", python.parents[1])
    install = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    run(*install, "--require-hashes", "-r", "requirements.lock")
    run(*install, *requirements)
    return python


def interpreter(archive: Path) -> Path:
    """Return the path of Python in the environment of an archive."""
    return WORK / "environments" / archive.name / "bin/python"


def listening_port(server: subprocess.Popen[str]) -> int:
    """Return the port of a server from its log, as soon as it listens."""
    log = []
    for line in server.stdout or ():
        log.append(line)
        if '"event":"listening"' in line:
            return int(json.loads(line)["port"])
    sys.exit("the server ended: " + "".join(log))


def check_sources(sdist: Path) -> None:
    """Check that the sdist contains the licence, the protocol, and no compiled or temporary file."""
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    missing = {"LICENSE", "protocol.md", "README.md", "genie/py.typed", "genie/protocol/schema.json"} - set(names)
    excess = [name for name in names if name.endswith((".so", ".pyc", ".c"))]
    if missing or excess:
        sys.exit(f"{sdist.name}: missing {missing}, too much {excess}")


def main() -> None:
    """Build and check a release, or do one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", action="store_true", help="build no compiled wheel and no image")
    parser.add_argument("--checksums", action="store_true", help="only write SHA256SUMS of the archives that are there")
    parser.add_argument("--tag", help="only check that this tag of git is the one of the version")
    options = parser.parse_args()
    if options.tag is not None:
        check_tag(options.tag)
    elif options.checksums:
        write_checksums()
    else:
        build(compiled=not options.sources)


def build(*, compiled: bool) -> None:
    """Build all archives, and check each."""
    shutil.rmtree(WORK, ignore_errors=True)
    sdists = {folder: build_sdist(folder) for folder in SOURCES}
    check_sources(sdists[LOCK_SERVER])
    for folder, sdist in sdists.items():
        build_wheels(sdist, compiled=compiled and folder == LOCK_SERVER)
    archives = [*sdists.values(), *sorted(DIST.glob("*.whl"))]
    run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    locks = [archive for archive in archives if archive.name.startswith("genie_lock-")]
    results = [check(archive) for archive in locks]
    results += [check_application(archive, locks[-1]) for archive in archives if archive not in locks]
    write_bill_of_materials(interpreter(locks[-1]))
    write_checksums()
    print(*results, *([build_image()] if compiled else []), sep="\n")


def write_checksums() -> None:
    """Write SHA256SUMS, and print it."""
    text = checksums(DIST)
    (DIST / "SHA256SUMS").write_text(text)
    print(text, end="")


def check_tag(tag: str) -> None:
    """End with an error if a tag is not that of the version."""
    expected = f"v{project()['version']}"
    if tag != expected:
        sys.exit(f"the tag is {tag}, but the tag of this version is {expected}")


if __name__ == "__main__":
    main()
