"""README.md is true: its commands print what it shows, its Python runs, its tables are those of the code."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import click
import pytest
from matching import Screen
from pages import ROOT, Block, blocks, code, errors_of, prose, table

import genie as package
import genie.testing
from genie.cli import COMMANDS, main
from servers import WAIT_S, Genie

PAGE = "README.md"
BLOCKS = blocks(PAGE)
PYTHON = [block for block in BLOCKS if block.language == "python"]
CONSOLE = [block for block in BLOCKS if block.language == "console"]

NOT_RUN = {
    "make serve": "serves until it is stopped, on the real port",
    "make test": "these tests are what it runs",
    "docker compose up --build --detach --wait": "needs a container engine; see test_containers.py",
}
"""Commands that are only checked for what they name."""

NETCAT = """\
import socket, sys, threading
arguments = [argument for argument in sys.argv[1:] if argument != "-N"]
with socket.create_connection((arguments[0], int(arguments[1]))) as sock:
    def forth():
        for line in sys.stdin.buffer:
            sock.sendall(line)
        if "-N" in sys.argv:
            sock.shutdown(socket.SHUT_WR)
    threading.Thread(target=forth, daemon=True).start()
    while data := sock.recv(1 << 16):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
"""
"""For machines without OpenBSD's nc: what the page uses of it."""


@pytest.fixture
def environment(genie: Genie, tmp_path: Path) -> dict[str, str]:
    netcat = shutil.which("nc")
    if netcat is None or "OpenBSD" not in subprocess.run([netcat, "-h"], capture_output=True, text=True).stderr:  # noqa: PLW1510
        (tmp_path / "nc.py").write_text(NETCAT)
        (tmp_path / "nc").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/nc.py" "$@"\n')
        (tmp_path / "nc").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{clean['PATH']}"
    return clean | {"PATH": path, "GENIE_HOST": genie.address[0], "GENIE_PORT": str(genie.port)}


# -- blocks ---------------------------------------------------------------------------------------------------


def test_every_block_is_executed_by_a_test_below() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "console", "text"}
    for block, before in zip(BLOCKS, [None, *BLOCKS], strict=False):
        if block.language == "text":
            assert before in PYTHON, f"{block}: a text block is what the python block before it prints"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs_and_prints_what_is_shown(block: Block, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), str(block)
    shown = dict(pairwise(BLOCKS)).get(block)
    if shown is not None and shown.language == "text":
        Screen().match_all(shown.lines, done.stdout.splitlines())


def commands(block: Block) -> list[tuple[int, str, list[str]]]:
    """The commands of a console block, each with its line and what is shown behind it."""
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.lines, block.line + 1):
        if line.startswith("$ "):
            found.append((number, line[2:], []))
        else:
            assert found, f"{block}: a console block begins with a command"
            found[-1][2].append(line)
    assert found, f"{block} is empty"
    return found


def test_the_console_shows_what_is_shown(environment: dict[str, str], genie: Genie) -> None:
    screen, status = Screen(), 0
    for block in CONSOLE:
        for line, command, shown in commands(block):
            where = f"{PAGE}:{line}: {command}"
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
    assert status == 0


def converse(command: str, shown: list[str], screen: Screen, environment: dict[str, str]) -> None:
    """Type the lines behind `->` and read those behind `<-`."""
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
        bound = threading.Timer(WAIT_S, process.kill)
        bound.start()
        try:
            for line in shown:
                assert line[:3] in ("-> ", "<- "), line
                if line.startswith("->"):
                    process.stdin.write(f"{screen.fill(line[3:])}\n")
                else:
                    screen.match(line[3:], process.stdout.readline())
        finally:
            bound.cancel()
            process.kill()


def test_what_is_not_run_can_be_run() -> None:
    shown = {command for block in CONSOLE for _, command, _ in commands(block)}
    assert shown >= NOT_RUN.keys(), "a command that is not on the page any more"
    for command in NOT_RUN:
        program, *arguments = command.split()
        if program == "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        else:
            assert program == "docker"
            assert (ROOT / "docker-compose.yml").is_file()
            assert (ROOT / "Dockerfile").is_file()


def command_named(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


# -- tables and sentences -------------------------------------------------------------------------------------


def test_the_configuration_is_that_of_serve() -> None:
    options = {}
    serve = command_named("serve")
    for option in serve.params:
        assert isinstance(option, click.Option)
        default = re.search(r"\[default: (\w+)\]", option.help or "")
        value = option.default if default is None else default[1]
        value = ",".join(value) if isinstance(value, tuple) else value
        variables = option.envvar if isinstance(option.envvar, list) else [option.envvar]
        options[option.opts[0]] = (", else ".join(map(str, variables)), "none" if value is None else str(value))
    rows = table(PAGE, "Option", "Variable", "Default")
    assert {code(row["Option"]): (row["Variable"].replace("`", ""), row["Default"]) for row in rows} == options
    for row in rows:
        (option,) = [option for option in serve.params if row["Option"] == f"`{option.opts[0]}`"]
        if isinstance(option.type, click.Choice):
            assert set(re.findall(r"`(\w+)`", row["Meaning"])) == set(option.type.choices), row


def test_the_commands_are_all_there_and_so_are_their_options() -> None:
    rows = table(PAGE, "Command")
    assert {code(row["Command"]).split()[1] for row in rows} == set(COMMANDS)
    for row in rows:
        command = command_named(code(row["Command"]).split()[1])
        known = {name: option for option in command.params if isinstance(option, click.Option) for name in option.opts}
        for name, argument in re.findall(r"`(--[\w-]+)( [A-Z]+)?`", row[""]):
            assert name in known, f"{command.name} {name}"
            assert known[name].is_flag != bool(argument), f"{command.name} {name}"
    with_json = {name for name in COMMANDS if any("--json" in option.opts for option in command_named(name).params)}
    (named,) = re.findall(r"^(.*) take `--json`", "\n".join(prose(PAGE)), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", named)) == with_json


def test_every_name_of_the_package_exists() -> None:
    text = "\n".join(prose(PAGE))
    names = set(re.findall(r"`genie\.([A-Za-z_.]+)", text)) | {"Client", "Lock"}
    for name in names:
        thing: object = package
        for part in name.split("."):
            thing = getattr(thing, part)
    errors = {code(row["Error"]).removeprefix("genie.") for row in table(PAGE, "Error")}
    raised = errors_of(package)
    assert raised <= names
    assert errors < raised


def _as_written(signature: inspect.Signature) -> str:
    """The parameters as the page shows them: with `*` before those that are given by keyword only, and without types."""
    shown = []
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(one.startswith("*") for one in shown):
            shown.append("*")
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else "=" + _value(parameter.default)
        shown.append(f"{star}{parameter.name}{default}")
    return ", ".join(shown)


def _value(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default).removesuffix(".0")


def test_the_calls_and_their_defaults_are_the_code_s() -> None:
    checked = set()
    for row in table(PAGE, "Call"):
        for call, arguments in re.findall(r"`([a-z.]+)\((.*?)\)`", row["Call"]):
            owner, _, name = call.rpartition(".")
            where = {"genie": package, "genie.sync": package.sync, "client": package.Client, "lock": package.Lock}[
                owner
            ]
            if arguments == "…":
                continue
            checked.add(call)
            assert arguments == _as_written(inspect.signature(getattr(where, name))), call
    assert checked >= {"genie.connect", "client.lock", "client.inspect", "lock.extend"}
