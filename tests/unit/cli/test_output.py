"""Commands whose output cannot be written, or whose input cannot be read, end with an error in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from genie.cli.output import output_columns
from genie.cli.store import _open_output, import_
from genie.cli.watch import _PipeMonitor
from support.processes.programs import start_genie


@pytest.mark.parametrize("arguments", [["config", "show"], ["config", "limits", "--json"]])
def test_a_full_disk_is_reported_in_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        process = start_genie(*arguments, env={}, text=True, stdout=full, stderr=subprocess.PIPE)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (1, "genie: cannot write the result: No space left on device\n")


def test_a_closed_stdout_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert output_columns(wide=False) is None


def test_an_export_to_a_closed_stdout_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(click.ClickException, match="the standard output is closed"), _open_output(Path("-")):
        pass


def test_an_import_from_a_closed_stdin_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.ClickException, match="the standard input is closed"):
        import_.main([], standalone_mode=False)


async def test_a_watch_with_a_closed_stdout_monitors_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    _PipeMonitor().close()
