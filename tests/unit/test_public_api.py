"""The public API is that of the lists: names, signatures, and fields on the wire."""

from __future__ import annotations

import difflib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import public_api


@pytest.mark.parametrize("path", public_api.PACKAGES)
def test_the_public_api_is_that_of_the_list(path: str) -> None:
    difference = list(
        difflib.unified_diff(
            (public_api.ROOT / path).read_text().splitlines(),
            public_api.listing(path).splitlines(),
            "list",
            "code",
            lineterm="",
            n=0,
        )
    )
    assert not difference, "the public API has changed; if that is intended: make public-api\n" + "\n".join(difference)


def module(source: str) -> types.ModuleType:
    made = types.ModuleType("genie.sample")
    exec("from __future__ import annotations\n" + source, made.__dict__)  # noqa: S102 - sources of this test
    return made


BASE = """
__all__ = ["Thing", "call"]
class Thing:
    size: int
    def __init__(self, size: int) -> None: ...
    @property
    def area(self) -> int: ...
    async def grow(self, by: int = 1, *, wait: bool = True) -> None: ...
    @classmethod
    def of(cls, name: str) -> Thing: ...
    def _hidden(self) -> None: ...
def call(name: str, *rest: str, mode: str = "x") -> None: ...
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("by: int = 1", "by: int = 2"),
        ("by: int = 1", "by: int"),
        ("by: int", "by: float"),
        ("*, wait", "wait"),
        ("async def grow", "def grow"),
        ("mode", "kind"),
        ("-> int: ...", "-> float: ..."),
        ("size: int\n", "size: str\n"),
        ("name: str) -> Thing", "title: str) -> Thing"),
        ('"Thing", ', ""),
    ],
)
def test_a_change_of_a_name_or_a_signature_changes_the_list(old: str, new: str) -> None:
    assert old in BASE
    before = list(public_api.package_lines(module(BASE)))
    assert list(public_api.package_lines(module(BASE.replace(old, new)))) != before


def test_private_names_are_not_in_the_list() -> None:
    before = list(public_api.package_lines(module(BASE)))
    assert list(public_api.package_lines(module(BASE.replace("_hidden", "_other")))) == before


FIELDS: dict[str, Any] = {
    "Payload": {
        "properties": {"id": {"type": "integer"}, "names": {"type": "array", "items": {"type": "string"}}},
        "required": ["id"],
    }
}


def test_fields_on_the_wire_are_listed_with_type_and_whether_they_are_required() -> None:
    assert list(public_api.wire_lines(FIELDS)) == ["wire Payload.id: integer", "wire Payload.names?: [string]"]
