"""Matches documented output with real output. Numbers that differ between runs
are bound to the real ones at their first occurrence."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

IDS = ("id", "waiter", "holder")
LOWER_BOUNDS = ("waited", "held")
RECENT_MS = 3_600_000

LONG = re.compile(r"\d{13,}")
NOTE = r"[\w.-]+ \d+@[\w.-]+"
"""The default note of a client: program, process and host."""
FENCE = r'(?<=fence )\d+|(?<="fence":)\d+|(?<=which is greater than )\d+'
"""A fencing token, which pages may shorten."""
VARIABLE = re.compile(rf"…|{NOTE}|{FENCE}|\d{{13,}}|\d+(?:\.\d+)? (?:µs|ms|s|min|h)\b|\s+")


class NumberBindings:
    """Maps the documented numbers of one kind to the real ones. Both must have the same order."""

    def __init__(self) -> None:
        self.real: dict[int, int] = {}

    def bind(self, shown: int, real: Any) -> None:
        assert type(real) is int, f"{real!r} is not an integer"
        bound = self.real.setdefault(shown, real)
        assert bound == real, f"{shown} was {bound} before, now it is {real}"
        assert sorted(self.real) == sorted(self.real, key=self.real.__getitem__), f"out of order: {self.real}"
        assert len(set(self.real.values())) == len(self.real), (
            f"two documented numbers for one real number: {self.real}"
        )


class Bindings:
    """The bindings of ids and fencing tokens in one example; compares documented messages with real ones."""

    def __init__(self) -> None:
        self.ids, self.fences = NumberBindings(), NumberBindings()

    def fill(self, message: Any) -> Any:
        """Replace the id in a documented message by the real one. An unbound id is sent as it is."""
        payload = message.get("payload") if isinstance(message, dict) else None
        if isinstance(payload, dict) and "id" in payload:
            real = self.ids.real.setdefault(payload["id"], payload["id"])
            return {**message, "payload": {**payload, "id": real}}
        return message

    def match(self, shown: Any, real: Any, field: str = "message") -> None:
        """Raise AssertionError if a real value does not match the documented one."""
        if field in IDS:
            self.ids.bind(shown, real)
        elif field == "fence":
            self.fences.bind(shown, real)
        elif field in LOWER_BOUNDS and not isinstance(shown, list):
            assert type(real) in (int, float), (field, real)
            assert real >= shown, (field, shown, real)
        elif field == "expiresIn":
            assert 0 <= real <= shown, (field, shown, real)
        elif field == "since":
            assert abs(real - time.time() * 1000) < RECENT_MS, (field, real)
        elif isinstance(shown, dict):
            assert isinstance(real, dict), (field, real)
            assert real.keys() == shown.keys(), f"{field}: shown {sorted(shown)}, real {sorted(real)}"
            for key, value in shown.items():
                self.match(value, real[key], key)
        elif isinstance(shown, list):
            assert isinstance(real, list), (field, real)
            assert len(real) == len(shown), (field, shown, real)
            for one, other in zip(shown, real, strict=True):
                self.match(one, other, f"{field}[]")
        elif isinstance(shown, str) and shown.endswith("…"):
            assert isinstance(real, str), (field, real)
            assert real.startswith(shown[:-1]), (field, shown, real)
        else:
            assert (type(shown), shown) == (type(real), real), (field, shown, real)


class Screen:
    """Compares documented terminal output with real output.

    Numbers of 13 digits or more, and fencing tokens, are bound; durations, spaces and default notes may differ; `…` matches any text.
    """

    def __init__(self) -> None:
        self.real: dict[str, str] = {}

    def fill(self, text: str) -> str:
        """Replace the numbers in a documented command by the real ones. KeyError if one is not bound."""
        return LONG.sub(lambda number: self.real[number[0]], text)

    def match_all(self, shown: Sequence[str], real: Sequence[str]) -> None:
        """Match all lines of an output. A line `…` matches any number of lines, also none."""
        if "…" in shown:
            position = shown.index("…")
            self.match_all(shown[:position], real[:position])
            rest = shown[position + 1 :]
            assert len(real) >= position + len(rest), f"shown: {shown}\n real: {real}"
            self.match_all(rest, real[len(real) - len(rest) :])
            return
        assert len(shown) == len(real), f"shown: {shown}\n real: {real}"
        for one, other in zip(shown, real, strict=True):
            self.match(one, other)

    def match(self, shown: str, real: str) -> None:
        """Raise AssertionError if a real line does not match the documented one."""
        pattern, groups = "", list[str]()
        end = 0
        for part in VARIABLE.finditer(shown.strip()):
            pattern += re.escape(shown.strip()[end : part.start()])
            end = part.end()
            text = part[0]
            if text == "…":
                pattern += ".*?"
            elif "@" in text:
                pattern += NOTE
            elif text.isspace():
                pattern += r"\s+"
            elif not text.isdigit():
                pattern += r"\d+(?:\.\d+)? (?:µs|ms|s|min|h)(?: \d+ \w+)?"
            elif text in self.real:
                pattern += self.real[text]
            elif text in groups:
                pattern += rf"(?P=n{text})"
            else:
                groups.append(text)
                pattern += rf"(?P<n{text}>\d{{13,}})"
        pattern += re.escape(shown.strip()[end:])
        match = re.fullmatch(pattern, real.strip())
        assert match is not None, f"shown: {shown}\n real: {real}"
        for text in groups:
            self.real[text] = match[f"n{text}"]
