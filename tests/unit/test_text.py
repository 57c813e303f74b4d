"""How texts of clients are made printable."""

from __future__ import annotations

import json

import pytest

from genie import text


def test_json_has_the_same_value_and_only_printable_characters() -> None:
    value = "a\u202eb\U0010ffff\ufe0fé"
    encoded = text.printable_json(json.dumps(value, ensure_ascii=False).encode())
    assert json.loads(encoded) == value
    assert text.is_printable(encoded.decode())


@pytest.mark.parametrize("escape", [text.printable, lambda each: text.printable_json(each.encode())])
def test_a_long_text_is_not_escaped_character_by_character(escape: object, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = text.is_printable
    monkeypatch.setattr(text, "is_printable", lambda each: calls.append(each) or original(each))
    assert callable(escape)
    escape("\U000f1234b" * 10_000)
    assert len(calls) <= 3


def test_the_escapes_of_few_characters_are_kept() -> None:
    every = "".join(map(chr, range(0x100000, 0x100000 + 3 * text.MAX_KEPT_ESCAPES)))
    assert text.printable(every).count("\\U") == len(every)
    assert len(text._escapes) <= text.MAX_KEPT_ESCAPES
