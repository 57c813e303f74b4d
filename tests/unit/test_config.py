"""Settings are groups in the code, and flat names for options and variables."""

from __future__ import annotations

import pytest

from genie.config import Limits, Settings


def test_flat_names_are_converted_to_groups_and_back() -> None:
    settings = Settings.from_options(port=1, max_line=2048, redis_url="redis://a", tls_cert="c", admin_port=None)
    assert (settings.port, settings.limits, settings.redis.url) == (1, Limits(max_line=2048), "redis://a")
    assert (settings.tls.cert, settings.admin.port) == ("c", None)
    assert Settings.from_options(**settings.options()) == settings


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="max_lines"):
        Settings.from_options(max_lines=1)
