"""Execute the examples of README.md and docs/: Python prints the shown output, commands print the shown lines."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from matching import Screen
from pages import DOCUMENTATION, ROOT, Block, blocks, errors_of

import genie as package
from genie.bench import profiles
from support.processes.servers import WAIT_S, Genie

BLOCKS = {page: blocks(page) for page in DOCUMENTATION}
ALL = [block for found in BLOCKS.values() for block in found]
PYTHON = [block for block in ALL if block.language == "python"]
CONSOLE = {
    page: console
    for page, found in BLOCKS.items()
    if (console := [block for block in found if block.language == "console"])
}

CONTAINERS = "needs a container engine; see test_containers.py"
HOURS = "takes minutes to hours"
NOT_RUN = {
    "make serve": "serves until it is stopped, on the real port",
    "make test": "runs these tests",
    "python -m pytest tests/unit/client tests/unit/test_public_api.py tests/docs/test_protocol.py tests/docs/test_schema.py": (
        "runs some of these tests"
    ),
    "make peers": HOURS,
    "make soak-faults": HOURS,
    'make soak-faults FAULTS="--seconds 600"': HOURS,
    'make soak-faults FAULTS="kill-redis --times 20 --seed 7 --lease 0.5"': HOURS,
    "GENIE_TESTS_REDIS_SERVER=/opt/valkey/bin/valkey-server python -m pytest tests/integration/test_leadership.py": (
        "needs another Redis"
    ),
    "make fuzz": HOURS,
    'make fuzz FUZZ="--inputs 100000 --seed 7"': HOURS,
    "make bench-tokens": HOURS,
    "python benchmarks/scaleout.py": HOURS,
    "docker compose up --build --detach --wait": CONTAINERS,
    "docker compose exec genie genie status": CONTAINERS,
    "docker compose exec genie cat /run/genie/token": CONTAINERS,
    "make bench-against BASE=HEAD~10 ROUNDS=9": HOURS,
    'pip install "genie-lock[testing]"': "installs packages",
    "apt-get install redis-server postgresql etcd-server npm gcc golang-go": "installs packages",
    "go install github.com/snower/slock@latest": "installs packages",
    "npm install --global live-mutex": "installs packages",
}
"""Commands that are only checked for what they name."""
SHELL_NOT_RUN = {
    "docs/concepts/verification.md": "the first command takes an hour, the second needs what it has written",
    "docs/how-to/backup.md": "needs two Redises; executed by test_backup.py",
    "docs/how-to/deploying.md": "needs the real admin port",
    "docs/how-to/high-availability.md": CONTAINERS,
    "docs/how-to/kubernetes.md": "needs a cluster; test_helm_chart.py renders the chart and runs its containers as processes",
    "docs/how-to/history.md": "needs a server with a history; test_history.py checks the commands",
    "docs/how-to/lock-order.md": "needs the real admin port; test_cli_order.py checks the same output",
    "applications/ledger/README.md": CONTAINERS,
    "applications/ledger/docs/ledger-timeouts.md": "the first block is executed by test_ledger_timeouts.py, the second serves",
    "docs/how-to/runbook.md": "executed by test_runbook.py",
    "docs/how-to/scaling.md": "serves until it is stopped, with a Redis on another host",
    "docs/how-to/systemd.md": "needs systemd as root; test_systemd.py verifies the unit",
    "docs/how-to/tracing.md": "installs packages",
    "docs/how-to/tls-and-tokens.md": "writes certificates and uses hosts that do not exist; see test_tls.py",
    "docs/reference/configuration.md": "needs a genie.toml; executed by test_configuration.py",
    "docs/reference/http-api.md": "needs the real admin port; test_admin_api.py requests every path",
}
"""Pages with blocks of shell commands, of which only the syntax is checked."""
MODULE = re.compile(r"# (\w+\.py)")
"""The first line of a block that later blocks of the page import."""
LANGUAGES = {"python", "py", "console", "text", "sh", "toml", "tree", "ts", "yaml", "ini", "sql"}
READ_TWICE = [
    "README.md",
    *(f"docs/how-to/recipes/{name}.md" for name in ("fastapi", "run-once", "saga", "web-views")),
    *(f"applications/{name}.md" for name in ("ledger/docs/ledger-timeouts", "tokens/docs/token-selection")),
    "docs/how-to/fencing.md",
    "docs/how-to/freeze-a-subtree.md",
    "docs/how-to/limit-concurrency.md",
    "docs/tutorials/closing-the-day.md",
]
"""Pages whose examples test_recipes.py executes one after the other, and twice, with one server."""
TYPESCRIPT_PAGES = "docs/how-to/recipes/"
"""The pages whose TypeScript is executed by clients/typescript/test/pages.test.ts."""


# -- blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", DOCUMENTATION)
def test_every_block_is_executed_by_a_test(page: str) -> None:
    for block, before in zip(BLOCKS[page], [None, *BLOCKS[page]], strict=False):
        assert block.language in LANGUAGES, f"{block}: {block.language}"
        if block.language == "text":
            shell = before is not None and before.language == "sh" and page in SHELL_NOT_RUN
            typescript = before is not None and before.language == "ts"
            assert shell or typescript or before in PYTHON, (
                f"{block}: a text block is the output of the block before it"
            )
        if block.language == "ts":
            assert page.startswith(TYPESCRIPT_PAGES), f"{block}: no test executes TypeScript on this page"
        if block.language == "sh":
            assert page in SHELL_NOT_RUN, f"{block}: SHELL_NOT_RUN has no reason why it is not executed"
    assert {block.language for found in BLOCKS.values() for block in found} >= {"python", "console", "sh", "text"}


@pytest.mark.parametrize("block", [block for block in PYTHON if block.page not in READ_TWICE], ids=str)
def test_python_prints_the_shown_output(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    printed = run_python(block, environment, tmp_path)
    shown = dict(pairwise(BLOCKS[block.page])).get(block)
    if shown is not None and shown.language == "text":
        Screen().match_all(shown.lines, printed)


def run_python(block: Block, environment: dict[str, str], folder: Path) -> list[str]:
    """Execute a block in a folder. Returns the lines that it has printed; it must not print errors or warnings."""
    write_modules(block, folder)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.text],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{block}: {done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def write_modules(block: Block, folder: Path) -> None:
    """Write the earlier blocks of the page that begin with `# NAME.py`, so that the block can import them."""
    found = BLOCKS[block.page]
    for earlier in found[: found.index(block)]:
        name = MODULE.fullmatch(earlier.lines[0])
        if earlier.language == "python" and name is not None:
            (folder / name[1]).write_text(earlier.text)


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "py"], ids=str)
def test_python_of_other_libraries_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "sh"], ids=str)
def test_shell_commands_parse(block: Block) -> None:
    subprocess.run(["bash", "-n", "-c", block.text], check=True, capture_output=True)


@pytest.mark.parametrize(
    "block",
    [block for block in ALL if block.language == "toml" and block.lines[0] not in {"# genie.toml", "[[phase]]"}],
    ids=str,
)
def test_a_token_file_has_known_keys(block: Block) -> None:
    for section in tomllib.loads(block.text).values():
        assert section.keys() <= {"token", "prefixes", "may"}
        assert {*section.get("may", ())} <= {"lock", "inspect", "admin"}


def test_a_load_profile_is_valid() -> None:
    (block,) = [block for block in ALL if block.language == "toml" and block.lines[0] == "[[phase]]"]
    assert profiles.parse(block.text)


def test_the_error_hierarchy_is_that_of_the_code() -> None:
    (block,) = [block for block in ALL if block.language == "tree"]
    parents: list[str] = []
    shown = {}
    for line in block.lines:
        name = re.search(r"\w+", line)
        assert name is not None
        depth = name.start() // 4
        parents[depth:] = [name[0]]
        shown[name[0]] = parents[depth - 1] if depth else "Exception"
    assert shown == {name: getattr(package, name).__bases__[0].__name__ for name in errors_of(package)}


def commands(block: Block) -> list[tuple[int, str, list[str]]]:
    """Return the commands of a console block, each with its line number and its expected output."""
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.lines, block.line + 1):
        if line.startswith("$ "):
            found.append((number, line[2:], []))
            continue
        assert found, f"{block}: a console block begins with a command"
        first, command, shown = found[-1]
        if command.endswith("\\"):  # the command continues in this line
            found[-1] = (first, f"{command}\n{line}", shown)
        else:
            shown.append(line)
    assert found, f"{block} is empty"
    return found


@pytest.mark.parametrize("page", [page for page in CONSOLE if page not in READ_TWICE])
def test_commands_print_the_shown_lines(page: str, environment: dict[str, str], genie: Genie) -> None:
    screen = Screen()
    for block in CONSOLE[page]:
        run_commands(block, screen, environment, genie)


def run_commands(block: Block, screen: Screen, environment: dict[str, str], genie: Genie) -> None:
    """Execute the commands of a console block, of which only the last may fail, if `echo $?` follows it."""
    status = 0
    for line, command, shown in commands(block):
        where = f"{block.page}:{line}: {command}"
        if command in NOT_RUN:
            assert not shown, where
            continue
        assert status == 0 or command == "echo $?", f"{where}: the command before failed with {status}"
        real = screen.fill(command).replace("7077", str(genie.port))
        if shown and shown[0].startswith("-> "):
            converse(real, shown, screen, environment)
            continue
        done = subprocess.run(
            ["bash", "-c", f"(exit {status})\n{real}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        status = done.returncode
        try:
            screen.match_all(shown, done.stdout.splitlines())
        except AssertionError as error:
            raise AssertionError(f"{where}\n{error}") from None
    assert status == 0, block


def converse(command: str, shown: list[str], screen: Screen, environment: dict[str, str]) -> None:
    """Send the lines after `->` and expect those after `<-`."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(WAIT_S, process.kill)
        timer.start()
        try:
            for line in shown:
                assert line[:3] in ("-> ", "<- "), line
                if line.startswith("->"):
                    process.stdin.write(f"{screen.fill(line[3:])}\n")
                else:
                    screen.match(line[3:], process.stdout.readline())
        finally:
            timer.cancel()
            process.kill()


def test_commands_that_are_not_run_exist() -> None:
    shown = {command for console in CONSOLE.values() for block in console for _, command, _ in commands(block)}
    assert shown >= NOT_RUN.keys(), "NOT_RUN contains a command that is on no page"
    pages = {block.page for block in ALL if block.language == "sh"}
    assert pages == SHELL_NOT_RUN.keys()
    for command in NOT_RUN:
        program, *arguments = (word for word in shlex.split(command) if not word.startswith("GENIE_"))
        if program == "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        elif program == "python":
            name = arguments[1] if arguments[0] == "-m" else arguments[0].removesuffix(".py").replace("/", ".")
            assert find_spec(name) is not None, command
            assert all((ROOT / each).exists() for each in arguments if each.startswith("tests/")), command
        elif program == "docker":
            assert (ROOT / "docker-compose.yml").is_file()
            assert (ROOT / "Dockerfile").is_file()
        else:
            assert "install" in arguments
