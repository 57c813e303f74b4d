from __future__ import annotations

import pytest

from genie.cli.format import clip, duration, fold, join_names, natural_key, shorten, table, width, wrap_table
from genie.protocol import codec
from genie.text import printable, printable_json


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0 ms"),
        (0, "0 ms"),
        (12.4, "12 ms"),
        (999.4, "999 ms"),
        (999.6, "1.0 s"),
        (3_249, "3.2 s"),
        (59_940, "59.9 s"),
        (59_960, "1 min 0 s"),
        (250_000, "4 min 10 s"),
        (3_599_400, "59 min 59 s"),
        (3_599_600, "1 h 0 min"),
        (7_500_000, "2 h 5 min"),
        (86_369_000, "23 h 59 min"),
        (86_371_000, "1 d 0 h"),
        (2_147_483_647, "24 d 21 h"),
    ],
)
def test_durations_are_readable(ms: float, text: str) -> None:
    assert duration(ms) == text


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\u202ec") == "a\\x1b[2Jb\\u202ec"
    assert printable("konto/ä") == "konto/ä"


def test_control_characters_in_json_are_escaped_and_keep_their_values() -> None:
    value = {"a\x1b[2J\x7f\x9b": ["b\u202e\u2066\u2028\x85\n", "c\U000e0041", "konto/ä\\", 1.5]}
    encoded = codec.dumps(value)
    assert printable_json(encoded).decode().isprintable()
    assert "konto/ä" in printable_json(encoded).decode()
    assert codec.loads(printable_json(encoded)) == value
    assert printable_json(b'{"a":1}') == b'{"a":1}'


def test_long_names_are_clipped_by_their_width() -> None:
    assert clip("accounts/1234", 13) == "accounts/1234"
    assert clip("accounts/12345", 13) == "accounts/123…"
    assert clip("口座口座口座", 8) == "口座口…"
    assert width(clip("口座口座口座", 8)) == 7
    assert width("e\u0301") == 1
    assert width("\u2764\ufe0f") == 1
    assert width("a\u20dd") == 1
    assert width("\u1112\u1161\u11ab") == 2


def test_omitted_names_are_counted() -> None:
    assert join_names(["a", "b"], 2) == "a b"
    assert join_names(["aaaa", "bbbb"], 500) == "aaaa bbbb +498"


def test_a_shortened_name_keeps_its_beginning_and_its_end() -> None:
    assert shorten("accounts/1234", 13) == "accounts/1234"
    assert shorten("transfer-0001", 9) == "tran…0001"
    assert shorten("transfer-0002", 8) == "tran…002"
    assert width(shorten("口座口座口座", 8)) <= 8
    assert shorten("abc", 1) == "…"


def test_a_long_text_is_folded_at_spaces_and_indented() -> None:
    assert fold("  ", "a bc defghijkl m", None) == ["  a bc defghijkl m"]
    assert fold("  ", "a bc defghijkl m", 10) == ["  a bc", "    defghi", "    jkl m"]


def test_a_wide_table_is_wrapped_in_its_columns_of_names() -> None:
    rows = [["1", "n" * 14, "x y", "3"], ["2", "m", "z", "12"]]
    headers = ["ID", "NAME", "OTHER", "N"]
    assert wrap_table(headers, rows, None, wrapped=(1, 2), right_aligned=(3,))[1] == [f"1   {'n' * 14}  x y     3"]
    assert wrap_table(headers, rows, 27, wrapped=(1, 2), right_aligned=(3,)) == [
        ["ID  NAME          OTHER   N"],
        [f"1   {'n' * 12}  x y     3", "    nn"],
        ["2   m             z      12"],
    ]


def test_columns_are_aligned() -> None:
    assert table(["ID", "NAME", "FOR"], [["1", "口座", "3.2 s"], ["100", "b", "12 ms"]], right_aligned=(2,)) == [
        "ID   NAME    FOR",
        "1    口座  3.2 s",
        "100  b     12 ms",
    ]


def test_natural_order_compares_numbers_by_value() -> None:
    names = ["", "007", "7", "10", "a", "a/2", "a/02/x", "a/10", "a/10/1", "a/b", "a²"]
    assert sorted(names, key=natural_key) == ["", "007", "7", "10", "a", "a/02/x", "a/2", "a/10", "a/10/1", "a/b", "a²"]
    assert natural_key("9" * 512) > natural_key("8" * 512)
