"""Text that would control a terminal, for tests that no command prints it."""

from __future__ import annotations

from genie.text import is_printable

HOSTILE = "\x1b[2J \x9b2J \u202e \u2066 \u2028 \x85 \n \x7f \U000e0041 \u3164 \u2800"
"""Clear screen, with ESC and with the C1 control; bidi override and isolate; line ends of Unicode; an invisible tag, an
invisible letter and an empty pattern."""
RAW = [char for char in HOSTILE if not is_printable(char)]


def of(kind: str) -> str:
    return f"{kind}{HOSTILE}{kind}"


def assert_printable(output: str, *, expects: str = "") -> None:
    """Assert that a text has no raw character. `expects` is a part of the text, which shows that it has a hostile value."""
    for char in RAW:
        assert char == "\n" or char not in output, (char, output)
    assert not any(each.startswith(" \\x7f") for each in output.splitlines()), ("a line end in a value", output)
    assert expects in output
