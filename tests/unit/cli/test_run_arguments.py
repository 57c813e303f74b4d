from __future__ import annotations

import importlib
from typing import Any

import pytest
from click.testing import CliRunner, Result

from genie.cli import main
from genie.cli.run import RunOptions


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """Record the options of `genie run` instead of running it."""
    options: list[RunOptions] = []
    monkeypatch.setattr(importlib.import_module("genie.cli.run"), "run_locked", lambda each: options.append(each) or 42)
    return options


def genie_run(*args: str, **variables: str) -> Result:
    return CliRunner().invoke(
        main, ["run", *args], env={"GENIE_HOST": None, "GENIE_PORT": None, "GENIE_NAMESPACE": None, **variables}
    )


def run_options(**changes: Any) -> RunOptions:
    defaults: dict[str, Any] = {"command": ("true",), "resources": ("exclusive:a",), "host": "127.0.0.1", "port": 7077}
    defaults |= {
        "namespace": None,
        "queue_timeout": None,
        "max_hold": None,
        "transaction": None,
        "priority": 0.0,
        "conflict_status": 1,
    }
    return RunOptions(**(defaults | {"kill_after": 10.0} | changes))


def test_units_and_subtrees_are_resources(recorded: list[RunOptions]) -> None:
    assert genie_run("1/4:exports", "exclusive:accounts/**", "shared:**", "--", "true").exit_code == 42
    assert recorded[0].resources == ("1/4:exports", "exclusive:accounts/**", "shared:**")
    result = genie_run("5/4:exports", "--", "true")
    assert result.exit_code == 2
    assert "units must be K/N" in result.stderr


@pytest.mark.parametrize(
    ("resource", "warning"),
    [
        (
            "accounts/*",
            "exclusive:accounts/* locks one plain name: only a name that ends in /** means all names below it",
        ),
        ("shared:accounts/**/2", "shared:accounts/**/2 locks one plain name"),
        ("**/2", "exclusive:**/2 locks one plain name"),
        ("accounts**", "exclusive:accounts** locks one plain name"),
        ("1/4:exports/*", "1/4:exports/* locks one plain name"),
        ("shared:1/4:exports", "locks the name '1/4:exports': a resource has only one mode"),
        ("1/4:shared:exports", "locks the name 'shared:exports'"),
        ("exclusive:exclusive:accounts/**", "locks the name 'exclusive:accounts/**'"),
        ("exclusive:accounts/**", ""),
        ("shared:**", ""),
        ("1/4:exports", ""),
        ("exclusive:tenant:7/2", ""),
        ("cron/*-5 * * * *", ""),
        ("2026/11", ""),
    ],
)
def test_a_plain_name_that_looks_like_more_is_locked_with_a_warning(
    recorded: list[RunOptions], resource: str, warning: str
) -> None:
    result = genie_run(resource, "--", "true")
    assert (result.exit_code, len(recorded)) == (42, 1)
    assert warning in result.stderr
    assert bool(result.stderr) is bool(warning)


def test_the_first_double_dash_separates_the_command(recorded: list[RunOptions]) -> None:
    assert genie_run("a", "--", "true").exit_code == 42
    assert genie_run("a", "shared:b:c", "-w", "1.5", "--", "ls", "-n", "--", "--host").exit_code == 42
    assert recorded == [
        run_options(),
        run_options(resources=("exclusive:a", "shared:b:c"), queue_timeout=1.5, command=("ls", "-n", "--", "--host")),
    ]


def test_all_options(recorded: list[RunOptions]) -> None:
    args = "-n --transaction-timeout 20 --transaction t --priority -3 -E 99 --kill-after 0 a -- true"
    genie_run(*args.split())
    genie_run("a", "--", "true", GENIE_HOST="::1", GENIE_PORT="17", GENIE_NAMESPACE="b")
    assert recorded == [
        run_options(queue_timeout=0, max_hold=20.0, transaction="t", priority=-3.0, conflict_status=99, kill_after=0.0),
        run_options(host="::1", port=17, namespace="b"),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("a", "put -- between"),
        ("a --", "COMMAND is missing after --"),
        ("-- true", "Missing argument 'RESOURCE...'"),
        ("exlusive:a -- true", "'exlusive' is not a mode"),
        ("-n -w 3 a -- true", "are mutually exclusive"),
        ("-w nan a -- true", "not a number of seconds from 0 to 2147483.647"),
        ("-w -1 a -- true", "not a number of seconds"),
        ("-w inf a -- true", "not a number of seconds"),
        ("-w 1e9 a -- true", "not a number of seconds"),
        ("--transaction-timeout 0 a -- true", "not a number of seconds from 0.001"),
        ("--transaction-timeout soon a -- true", "not a number of seconds"),
        ("-E 256 a -- true", "a whole number from 0 to 255 is needed"),
        ("--port 0 a -- true", "a port is a number from 1 to 65535"),
    ],
)
def test_invalid_arguments_are_usage_errors(recorded: list[RunOptions], args: str, message: str) -> None:
    result = genie_run(*args.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert not recorded


def test_an_empty_command_is_a_usage_error(recorded: list[RunOptions]) -> None:
    assert genie_run("a", "--", "").exit_code == 2
    assert not recorded


def test_help_needs_no_command() -> None:
    result = genie_run("--help")
    assert result.exit_code == 0
    assert "run [OPTIONS] RESOURCE... -- COMMAND [ARGUMENT]..." in result.output


def test_the_help_shows_the_exit_statuses_as_a_table() -> None:
    text = CliRunner().invoke(main, ["run", "--help"]).output
    assert "\\b" not in text
    assert "\n    126  COMMAND could not be executed\n    127  COMMAND was not found\n" in text
