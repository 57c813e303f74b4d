"""The README is short, names the two commands of the set-up, and does not repeat the tutorials."""

from __future__ import annotations

import re

import pytest
from pages import ROOT, blocks

README = (ROOT / "README.md").read_text()
PAGES = ("README.md", "docs/tutorials/first-lock.md", "docs/tutorials/python.md", "docs/tutorials/moving-money.md")


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_it_has_at_most_200_lines() -> None:
    assert len(README.splitlines()) <= 200


def test_two_commands_do_the_set_up_before_any_package_index_is_named() -> None:
    install = section("Install")
    assert "$ make serve\n$ make test\n" in install
    assert install.index("make test") < install.index("pip install")


def test_the_commands_of_ci_are_in_the_readme() -> None:
    commands = re.findall(r"^make .*\b(test|clients)\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert sorted(commands) == ["clients", "test"]
    assert all(f"`make {command}`" in section("Install") for command in commands)


def test_it_names_every_program_that_make_test_installs() -> None:
    announced = re.search(r"^MISSING = (.*?)\n\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert announced is not None
    for package in re.findall(r",,([\w-]+)\)", announced[1]):
        assert f"`{package}`" in section("Install"), package


@pytest.mark.parametrize("page", PAGES)
def test_no_other_tutorial_has_the_same_example(page: str) -> None:
    others = {block.text for other in PAGES if other != page for block in blocks(other) if len(block.lines) > 2}
    assert not others & {block.text for block in blocks(page)}
