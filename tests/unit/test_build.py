"""What a server and `genie bench` say about their build."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator

import pytest

from genie import build, core
from genie.version import VERSION


@pytest.fixture(autouse=True)
def _without_cache() -> Iterator[None]:
    build.description.cache_clear()
    yield
    build.description.cache_clear()


def test_a_description_names_the_version_the_build_and_the_interpreter() -> None:
    kind = "compiled" if core.manager.__file__.endswith(".so") else "pure Python"
    interpreter = f"{platform.python_implementation()} {platform.python_version()}"
    assert build.description().startswith(f"genie/{VERSION} ({kind}; {interpreter}, ")


@pytest.mark.parametrize(
    ("options", "flag", "text"),
    [
        ("'--enable-shared' '--enable-optimizations' '--with-lto'", "-fprofile-use", "optimized"),
        ("'--enable-shared'", "-fprofile-use -fprofile-correction", "not optimized"),
        ("'--enable-shared'", "", "optimized"),  # Debian
        (None, None, "optimization unknown"),
    ],
)
def test_the_record_of_the_interpreter_says_whether_it_is_optimized(
    monkeypatch: pytest.MonkeyPatch, options: str | None, flag: str | None, text: str
) -> None:
    record = {"CONFIG_ARGS": options, "PGO_PROF_USE_FLAG": flag}
    monkeypatch.setattr(sysconfig, "get_config_var", record.get)
    assert build.description().endswith(f" {platform.python_version()}, {text})")
