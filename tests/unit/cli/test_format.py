from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from shutil import which

import orjson
import pytest

import genie
from genie.cli.format import clip, duration, fold, join_names, natural_key, shorten, table, width, wrap_table
from genie.protocol import codec
from genie.text import is_printable, printable, printable_json

INVISIBLE = [
    *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180F, 0x2800, 0x3164, 0xFE00, 0xFE0F, 0xFFA0),
    *(0xE0100, 0xE01EF),
]
"""Code points of characters that a reader does not see, although Python counts them as printable."""


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


@pytest.mark.parametrize("char", [*map(chr, INVISIBLE)])
def test_invisible_characters_are_escaped(char: str) -> None:
    assert printable(f"a{char}b") == f"a{char.encode('unicode_escape').decode()}b"
    assert printable_json(orjson.dumps(f"a{char}b")) == json.dumps(f"a{char}b").encode()


def test_all_ignorable_characters_are_escaped() -> None:
    """The property `Default_Ignorable_Code_Point` of Unicode 15.1."""
    ranges = (
        "00AD 034F 061C 115F-1160 17B4-17B5 180B-180F 200B-200F 202A-202E 2060-206F 3164 FE00-FE0F FEFF FFA0 FFF0-FFF8 "
        "1BCA0-1BCA3 1D173-1D17A E0000-E0FFF"
    )
    for each in ranges.split():
        first, _, last = each.partition("-")
        for code in range(int(first, 16), int(last or first, 16) + 1):
            assert not is_printable(chr(code)), hex(code)


def test_letters_of_all_scripts_are_printed() -> None:
    for text in ("konto/ä", "口座", "счёт", "계좌", "ខ្មែរ", "हिन्दी", "⠁", "💳", "e\u0301"):
        assert printable(text) == text


ESCAPED_BY_THE_PAGE = """
import(process.argv[1]).then(({ escapeInvisible }) => {
  const codes = JSON.parse(process.argv[2]);
  console.log(JSON.stringify(codes.map((code) => escapeInvisible(String.fromCodePoint(code)).length > 2)));
});
"""


@pytest.mark.skipif(which("node") is None, reason="node is not installed")
def test_the_page_escapes_the_same_characters() -> None:
    codes = [*INVISIBLE, *range(0x20, 0x250), 0x200B, 0x202E, 0x2028, 0x3000, 0x2801, 0xE0041, 0x1F4B3]
    page = Path(genie.__file__).parent / "admin/page/format.js"
    with tempfile.TemporaryDirectory() as directory:
        module = shutil.copy(page, Path(directory) / "format.mjs")
        arguments = ["node", "-e", ESCAPED_BY_THE_PAGE, str(module), json.dumps(codes)]
        result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [not is_printable(chr(code)) for code in codes]


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


@pytest.mark.parametrize("shorten_text", [clip, shorten])
def test_a_long_text_is_measured_few_times(
    shorten_text: Callable[[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may choose a name whose escapes have 5,000 characters."""
    measured = 0

    def measure(text: str) -> int:
        nonlocal measured
        measured += len(text)
        return width(text)

    monkeypatch.setattr("genie.cli.format.width", measure)
    name = "é" + "\U000e0100" * 511
    assert width(shorten_text(name, 40)) <= 40
    assert measured <= 4 * len(printable(name))


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
