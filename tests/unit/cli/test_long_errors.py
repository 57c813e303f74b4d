"""An error that repeats a long or damaged value is one short error."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from genie.cli import main
from genie.cli.lazy_group import MAX_MESSAGE


@pytest.mark.parametrize("variable", ["GENIE_PORT", "GENIE_MAX_LINE", "GENIE_NAMESPACE", "GENIE_REDIS_PORT"])
def test_the_error_about_a_long_value_is_short(variable: str) -> None:
    result = CliRunner().invoke(main, ["config", "check"], env={variable: "x" * 1_000_000})
    assert result.exit_code == 2
    assert variable in result.output
    assert len(result.output) < MAX_MESSAGE + 1_000


def test_a_name_that_is_not_utf_8_is_one_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["history", "\udcff", "--history-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith("genie: ")
