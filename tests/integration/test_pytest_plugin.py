"""The fixtures of the package in a project of their own: separate runs of pytest, which find them by the entry point."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.servers import WAIT_S

pytestmark = pytest.mark.server

INI = """
[pytest]
filterwarnings = error
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
"""

BLOCKING = """
import os, subprocess, sys

import genie

def test_the_client_locks(genie_client):
    with genie_client.lock("exclusive:a") as lock:
        assert lock.fence > 0
        assert len(genie_client.inspect().holders) == 1

def test_each_test_begins_without_locks(genie_client):
    assert genie_client.inspect().holders == ()
    genie_client.acquire("exclusive:a")  # is left behind

def test_locks_of_another_test_are_gone(genie_client):
    assert genie_client.inspect().holders == ()

def test_services_find_the_server(genie_server, genie_client):
    assert (os.environ["GENIE_HOST"], os.environ["GENIE_PORT"]) == (genie_server.host, str(genie_server.port))
    assert "GENIE_TOKEN" not in os.environ
    with genie.sync.connect() as service, service.lock("exclusive:a"):
        assert len(genie_client.inspect().holders) == 1
    child = "import genie.sync\\nwith genie.sync.connect() as client: print(client.inspect().holders)"
    assert subprocess.check_output([sys.executable, "-c", child], text=True) == "()\\n"
"""

ASYNC = """
import genie

async def test_the_client_locks(genie_async_client, genie_server):
    async with genie_async_client.lock("exclusive:a"), genie.connect(*genie_server) as other:
        assert len((await other.inspect()).holders) == 1

async def test_each_test_begins_without_locks(genie_async_client):
    assert (await genie_async_client.inspect()).holders == ()
"""


FOREIGN = ("anyio", "hypothesispytest", "xdist", "xdist.looponfail")
"""Plugins of other packages, which take longer to import than a run takes."""


def run_pytest(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    folder.joinpath("test_service.py").write_text(text)
    folder.joinpath("pytest.ini").write_text(INI)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(f"-pno:{name}" for name in ("cacheprovider", *FOREIGN)), *options],
        cwd=folder,
        env=os.environ | {"GENIE_TOKEN": "of-another-server"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_blocking_tests(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, BLOCKING)
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs/how-to/testing.md").read_text()
    (example,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "genie_client" in text]
    done = run_pytest(tmp_path, example)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_tests_with_asyncio(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, ASYNC)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_nothing_is_imported_for_a_test_that_uses_no_fixture(tmp_path: Path) -> None:
    text = (
        "import sys\n\ndef test():\n    assert not {'orjson', 'msgspec', 'structlog', 'redis'} & sys.modules.keys()\n"
    )
    done = run_pytest(tmp_path, text)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "genie_server" in run_pytest(tmp_path, text, "--fixtures").stdout


def test_without_the_server_a_test_that_uses_it_names_the_extra(tmp_path: Path) -> None:
    text = "def test(genie_server):\n    raise AssertionError\n"
    without = "import sys\nsys.modules['structlog'] = None\n"
    tmp_path.joinpath("conftest.py").write_text(without)
    done = run_pytest(tmp_path, text)
    assert "1 error" in done.stdout, done.stdout + done.stderr
    assert "genie_server needs the package structlog: pip install 'genie-lock[server]'" in done.stdout


def test_without_lupa_simulated_worlds_name_the_extra_in_one_line(tmp_path: Path) -> None:
    text = (
        "import pytest, genie.testing\n\nasync def main():\n    pass\n\n"
        "def test_explore():\n    genie.testing.explore(main)\n\n"
        "def test_run():\n    genie.testing.run(main(), faults=[])\n\n"
        "@pytest.mark.genie_explore(seeds=20)\nasync def test_marker():\n    pass\n"
    )
    tmp_path.joinpath("conftest.py").write_text("import sys\nsys.modules['lupa'] = None\n")
    done = run_pytest(tmp_path, text)
    assert "3 failed" in done.stdout, done.stdout + done.stderr
    error = "E       ModuleNotFoundError: simulated worlds need the package lupa: pip install 'genie-lock[testing]'"
    lines = done.stdout.splitlines()
    assert [line.rstrip() for line in lines if line.startswith("E ")][:2] == [error, error]
    assert len(lines) < 60, done.stdout
    assert "simulation/redis" not in done.stdout, "the frames of the package are hidden"
