"""Matches documented output with real output. Numbers that differ in each run are bound at their first occurrence."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

IDS = ("id", "waiter", "holder")
LOWER_BOUNDS = ("waited", "held")
RECENT_MS = 3_600_000

LONG = re.compile(r"\d{13,}")
SOME = re.compile(r"…|\d{13,}|\d+(?:\.\d+)? (?:µs|ms|s|min|h)\b|\s+")


class Names:
    """Stand-ins for numbers of one kind. They must stand in the order of the real ones."""

    def __init__(self) -> None:
        self.real: dict[int, int] = {}

    def bind(self, shown: int, real: Any) -> None:
        assert type(real) is int, f"{real!r} is no integer"
        known = self.real.setdefault(shown, real)
        assert known == real, f"{shown} was {known} before, now it is {real}"
        assert sorted(self.real) == sorted(self.real, key=self.real.__getitem__), f"out of order: {self.real}"
        assert len(set(self.real.values())) == len(self.real), f"two names for one number: {self.real}"


class Book:
    """The bindings of one example."""

    def __init__(self) -> None:
        self.ids, self.fences = Names(), Names()

    def fill(self, message: Any) -> Any:
        """A message to be sent, with the real ids in it. An id that was never assigned stands for itself."""
        payload = message.get("payload") if isinstance(message, dict) else None
        if isinstance(payload, dict) and "id" in payload:
            real = self.ids.real.setdefault(payload["id"], payload["id"])
            return {**message, "payload": {**payload, "id": real}}
        return message

    def match(self, shown: Any, real: Any, field: str = "message") -> None:
        """AssertionError where the real thing is not what is shown."""
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
    """What a terminal shows. A number of 13 digits or more is bound; durations and spaces differ; `…` is anything."""

    def __init__(self) -> None:
        self.real: dict[str, str] = {}

    def fill(self, text: str) -> str:
        """A command, with the real numbers in it. KeyError for one that was not shown before."""
        return LONG.sub(lambda number: self.real[number[0]], text)

    def match_all(self, shown: Sequence[str], real: Sequence[str]) -> None:
        """The same for all lines of an output; a line that is only `…` stands for any lines, also none."""
        if "…" in shown:
            at = shown.index("…")
            self.match_all(shown[:at], real[:at])
            rest = shown[at + 1 :]
            assert len(real) >= at + len(rest), f"shown: {shown}\n real: {real}"
            self.match_all(rest, real[len(real) - len(rest) :])
            return
        assert len(shown) == len(real), f"shown: {shown}\n real: {real}"
        for one, other in zip(shown, real, strict=True):
            self.match(one, other)

    def match(self, shown: str, real: str) -> None:
        """AssertionError where the real line is not what is shown."""
        pattern, groups = "", list[str]()
        end = 0
        for part in SOME.finditer(shown.strip()):
            pattern += re.escape(shown.strip()[end : part.start()])
            end = part.end()
            text = part[0]
            if text == "…":
                pattern += ".*?"
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
        found = re.fullmatch(pattern, real.strip())
        assert found is not None, f"shown: {shown}\n real: {real}"
        for text in groups:
            self.real[text] = found[f"n{text}"]
