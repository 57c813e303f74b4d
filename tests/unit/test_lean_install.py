"""The package without its extras: a client and most commands run, and the others name the extra that they need."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from genie.cli import COMMANDS
from genie.version import VERSION
from support.processes.servers import WAIT_S

PROJECT = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]

LEAN_COMMANDS = {"bench", "explain", "inspect", "release", "run", "status", "waits", "watch"}

WITHOUT_EXTRAS = """
import importlib.abc, sys

class WithoutExtras(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, WithoutExtras())
"""

MODULES = {"prometheus-client": "prometheus_client", "opentelemetry-api": "opentelemetry"}
"""The module of each package whose name differs."""


def packages(requirements: list[str]) -> set[str]:
    """Return the names of the required packages, as modules."""
    names = {re.match(r"[\w-]+", requirement).group() for requirement in requirements}  # type: ignore[union-attr]
    return {MODULES.get(name, name) for name in names}


def without_extras(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that can import only what a client requires."""
    extras = PROJECT["optional-dependencies"]
    blocked = packages([requirement for name in ("server", "sql", "otel") for requirement in extras[name]])
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS.format(packages=blocked) + program, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_a_client_requires_three_packages() -> None:
    assert packages(PROJECT["dependencies"]) == {"orjson", "msgspec", "click"}


def test_both_clients_are_imported_without_extras() -> None:
    program = (
        "import genie; genie.connect; genie.sync.connect\n"
        "foreign = {name.partition('.')[0] for name in sys.modules} - {*sys.stdlib_module_names}\n"
        "print('importlib.metadata' in sys.modules, {'redis', 'structlog', 'aiohttp', 'click'} & foreign)"
    )
    done = without_extras(program)
    assert (done.stdout, done.stderr) == ("False set()\n", "")


def test_a_server_is_imported_without_what_only_redis_or_the_admin_port_needs() -> None:
    """Without these modules, the server starts in two thirds of the time."""
    program = "import sys, genie.cli.serve, genie.server.app; print({'redis', 'aiohttp'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"set()\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_the_extra_that_it_needs(command: str) -> None:
    done = without_extras("from genie.cli import main\nmain(prog_name='genie')", command, "--help")
    if command in LEAN_COMMANDS:
        assert done.stdout.startswith(f"Usage: genie {command}")
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert (done.returncode, done.stdout) == (1, "")
        text = f"genie: genie {command} needs the package [a-z_]+: pip install 'genie-lock\\[server]'\n"
        assert re.fullmatch(text, done.stderr)


def test_the_version_is_that_of_the_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", VERSION)
    done = without_extras("from genie.cli import main\nmain(prog_name='genie')", "--version")
    assert done.stdout == f"genie, version {VERSION}\n"


def test_the_tools_for_tests_name_their_extra() -> None:
    done = without_extras("import genie.testing")
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: genie.testing needs the packages of a server: pip install 'genie-lock[testing]'"
    )


def test_tracing_names_its_extra() -> None:
    done = without_extras("import genie.otel")
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: genie.otel needs the package opentelemetry-api: pip install 'genie-lock[otel]'"
    )


def test_the_help_needs_no_extra() -> None:
    done = without_extras("from genie.cli import main\nmain(prog_name='genie')", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {command} " in done.stdout for command in COMMANDS)
