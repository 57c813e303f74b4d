"""The help and the errors of `genie`: whole sentences, one prefix, and the next step."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from genie.cli import COMMANDS, SECTIONS, main


def words(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def test_the_help_lists_every_command_in_a_section_with_a_whole_sentence() -> None:
    text = words(CliRunner().invoke(main, ["--help"]).output)
    positions = [text.index(f"{title}: ") for title in ("Locks", "Look inside", "Operate")]
    assert positions == sorted(positions)
    for sentence in (sentence for section in SECTIONS.values() for sentence in section.values()):
        assert sentence.endswith(".")
        assert sentence in text
    assert "..." not in text.replace("[ARGS]...", "")


@pytest.mark.parametrize("group", ["config", "store"])
def test_the_help_of_a_group_has_whole_sentences(group: str) -> None:
    text = CliRunner().invoke(main, [group, "--help"]).output.partition("Commands:")[2]
    assert text
    assert "..." not in text


@pytest.mark.parametrize("arguments", [["nope"], ["--nope"], ["serve", "--nope"], ["config", "nope"], ["inspect", "x"]])
def test_each_error_has_the_same_prefix_and_follows_the_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="genie")
    *usage, message = result.stderr.splitlines()
    assert result.exit_code == 2
    assert message.startswith("genie: ")
    assert usage[0].startswith("Usage: genie ")
    assert " --help' for help." in usage[1]


@pytest.mark.parametrize("group", [[], ["config"], ["store"]])
def test_a_group_without_a_command_prints_only_its_help(group: list[str]) -> None:
    result = CliRunner().invoke(main, group, prog_name="genie")
    assert result.exit_code == 2
    assert result.stderr == CliRunner().invoke(main, [*group, "--help"], prog_name="genie").stdout


@pytest.mark.parametrize(
    ("arguments", "meant"), [(["statsu"], "status"), (["config", "chekc"], "check"), (["store", "exprot"], "export")]
)
def test_the_error_for_an_unknown_command_names_a_similar_one(arguments: list[str], meant: str) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="genie")
    assert result.exit_code == 2
    assert result.stderr.endswith(f"\ngenie: there is no command {arguments[-1]!r}: did you mean {meant!r}?\n")


def test_a_folder_without_a_history_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["history", "--history-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path} has no history of the namespace 'genie'.\n"


@pytest.mark.parametrize("command", ["history", "replay"])
@pytest.mark.parametrize("arguments", [[], ["--history-dir", "/does/not/exist"]])
def test_without_a_folder_the_error_says_how_to_record_a_history(command: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(main, [command, *arguments], env={"GENIE_HISTORY_DIR": None})
    assert result.exit_code == 2
    assert "--history-dir" in result.stderr
    assert "genie serve --history-dir FOLDER" in result.stderr


def test_without_a_server_the_error_says_how_to_start_one() -> None:
    result = CliRunner().invoke(main, ["status", "--host", "127.0.0.1", "--port", "1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("genie: no server at 127.0.0.1:1: ")
    assert result.stderr.endswith("(`genie serve` starts one; --host and --port choose another)\n")


def test_without_a_server_on_this_machine_the_error_names_the_settings_of_a_server() -> None:
    environment = {"GENIE_ADMIN_PORT": "1"}
    result = CliRunner().invoke(main, ["status", "--local"], env=environment)
    assert result.exit_code == 1
    assert result.stderr.startswith("genie: cannot connect to the admin port 127.0.0.1:1: [Errno ")
    assert result.stderr.endswith("(`genie serve` starts one; GENIE_ADMIN_HOST and GENIE_ADMIN_PORT choose another)\n")


@pytest.mark.parametrize("arguments", [[], ["--what-if", "removed"]])
def test_a_replay_of_a_folder_without_a_history_is_an_error(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["replay", "--history-dir", str(tmp_path), "--namespace", "orders", *arguments])
    assert result.exit_code == 1
    assert result.stderr == f"genie: {tmp_path} has no history of the namespace 'orders'\n"


def test_a_timeout_is_always_that_of_the_server() -> None:
    context = main.make_context("genie", [], resilient_parsing=True)
    found = set()
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        found |= {option.help for option in command.params if "--timeout" in option.opts}  # type: ignore[attr-defined]
    assert found == {"Response timeout of the server."}
