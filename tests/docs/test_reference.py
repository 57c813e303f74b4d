"""The tables of docs/reference/ agree with the code: commands, options, calls, errors."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import click
from pages import DOCUMENTATION, ROOT, code, errors_of, prose, table, tables

import genie as package
import genie.testing
from genie import otel
from genie.cli import COMMANDS, main

CLI = "docs/reference/cli.md"
CONFIGURATION = "docs/reference/configuration.md"
ERRORS = "docs/reference/errors.md"
API = "docs/reference/python.md"


def command_named(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


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
    rows = table(CONFIGURATION, "Option", "Variable", "Default")
    assert {code(row["Option"]): (row["Variable"].replace("`", ""), row["Default"]) for row in rows} == options
    for row in rows:
        (option,) = [option for option in serve.params if row["Option"] == f"`{option.opts[0]}`"]
        if isinstance(option.type, click.Choice):
            assert set(re.findall(r"`(\w+)`", row["Meaning"])) == set(option.type.choices), row


def test_the_commands_are_all_there_and_so_are_their_options() -> None:
    rows = table(CLI, "Command")
    assert {code(row["Command"]).split()[1] for row in rows} == set(COMMANDS)
    for row in rows:
        command = command_named(code(row["Command"]).split()[1])
        known = {name: option for option in command.params if isinstance(option, click.Option) for name in option.opts}
        for name, argument in re.findall(r"`(--[\w-]+)( [A-Z]+)?`", row[""]):
            assert name in known, f"{command.name} {name}"
            assert known[name].is_flag != bool(argument), f"{command.name} {name}"
    with_json = {name for name in COMMANDS if any("--json" in option.opts for option in command_named(name).params)}
    (named,) = re.findall(r"^(.*) take `--json`", "\n".join(prose(CLI)), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", named)) == with_json


def test_every_name_of_the_package_exists() -> None:
    text = "\n".join(line for page in DOCUMENTATION for line in prose(page))
    names = set(re.findall(r"`genie\.(?!NAMESPACE\.svc)([A-Za-z_.]+)", text)) | {"Client", "Lock"}
    telemetry = set(re.findall(r'"genie\.([a-z_.]+)"', Path(otel.__file__).read_text()))
    assert telemetry <= names
    for name in names - telemetry:
        pkgutil.resolve_name(f"genie.{name}")
    errors = {code(row["Error"]).removeprefix("genie.") for row in table(ERRORS, "Error")}
    raised = errors_of(package)
    assert raised <= names
    assert errors < raised


def _as_written(signature: inspect.Signature) -> str:
    """The parameters as the page shows them: with `*` before the keyword-only ones, and without types."""
    shown = []
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(one.startswith("*") for one in shown):
            shown.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else "=" + _value(parameter.default)
        shown.append(f"{star}{parameter.name}{default}")
    return ", ".join(shown)


def _value(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default).removesuffix(".0")


def test_the_calls_and_their_defaults_are_the_code_s() -> None:
    checked = set()
    for row in table(API, "Call"):
        for call, arguments in re.findall(r"`([a-z.]+)\((.*?)\)`", row["Call"]):
            owner, _, name = call.rpartition(".")
            where = {
                "genie": package,
                "genie.sync": package.sync,
                "genie.otel": otel,
                "client": package.Client,
                "lock": package.Lock,
                "tx": package.Transaction,
            }[owner]
            if arguments == "…":
                continue
            checked.add(call)
            assert arguments == _as_written(inspect.signature(getattr(where, name))), call
    assert checked >= {"genie.connect", "client.lock", "client.inspect", "lock.extend"}


def test_the_defaults_of_the_parameters_are_the_code_s() -> None:
    parameters = {
        name: parameter.default
        for call in (package.connect, package.Client.acquire)
        for name, parameter in inspect.signature(call).parameters.items()
    }
    for row in table(API, "Parameter"):
        assert row["Default"].strip("`") == _value(parameters[code(row["Parameter"])]), row


def test_each_bound_has_a_test() -> None:
    rows = [row for rows in tables("docs/concepts/security.md", "Input") for row in rows]
    assert len(rows) > 60
    for row in rows:
        paths = re.findall("`([^`]+)`", row["Test"])
        assert paths, row
        for path in paths:
            assert path.startswith("tests/")
            assert (ROOT / path).is_file(), path
