"""An error that repeats a long value is printed without its middle."""

from __future__ import annotations

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
