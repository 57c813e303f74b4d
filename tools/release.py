"""Builds a release in build/release/dist, and checks it: `make release`.

A release consists of the sdist, a pure wheel, a wheel for this platform whose hot modules are compiled, a software bill of
materials (CycloneDX) of what the image installs, and SHA256SUMS. The wheels are built from the sdist. Where a Docker engine
runs, the image is built, too. Each archive is installed into an environment of its own, in which a server is started
and a first lock is taken.
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
SOURCES = ("genie", "pyproject.toml", "README.md", "LICENSE", "protocol.md", "CHANGELOG.md")
LINK = re.compile(r"(!?)(\[(?:[^\]]|\n)*\]\()([^)\s#:]+)(#[^)\s]*)?\)")
FIRST_LOCK = """
import asyncio, sys, genie, genie.build
async def main():
    async with genie.connect("127.0.0.1", int(sys.argv[1])) as client:
        async with client.lock("exclusive:accounts/2", transaction="transfer-42") as lock:
            print(lock.id, lock.fence, genie.build.IS_COMPILED, genie.__version__)
asyncio.run(main())
"""


def project() -> dict[str, str]:
    """Return the version and the address of the repository."""
    text = (ROOT / "genie/version.py").read_text()
    version = re.search(r'VERSION: Final = "([^"]+)"', text)
    if version is None:
        sys.exit("genie/version.py has no version")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    return {"version": version[1], "repository": urls["Repository"]}


def with_absolute_links(markdown: str, repository: str, version: str) -> str:
    """Point relative links at the files of the tagged version: PyPI shows the README without the repository."""

    def absolute(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        path = posixpath.normpath(target)
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


def build_sdist() -> Path:
    """Build the sdist from a copy of the sources, in which the links of the README are absolute."""
    shutil.rmtree(WORK, ignore_errors=True)
    source = WORK / "source"
    source.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source / name)
    readme = source / "README.md"
    readme.write_text(with_absolute_links(readme.read_text(), **project()))
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, source)
    (sdist,) = DIST.glob("*.tar.gz")
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
    python = interpreter(archive)
    environment = python.parents[1]
    run(sys.executable, "-m", "venv", environment)
    install = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    run(*install, "--require-hashes", "-r", "requirements.lock")
    run(*install, f"genie-lock[server] @ {archive.as_uri()}")
    serve = (environment / "bin/genie", "serve", "--port", "0", "--admin-port", "0")
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
    sdist = build_sdist()
    check_sources(sdist)
    build_wheels(sdist, compiled=compiled)
    archives = [sdist, *sorted(DIST.glob("*.whl"))]
    run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    results = [check(archive) for archive in archives]
    write_bill_of_materials(interpreter(archives[-1]))
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
