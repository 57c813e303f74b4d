"""Patterns of the cases: variables, operators, and the comparison of a message with a pattern.

README.md describes the patterns in "The format of the cases".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

VARIABLE: Final = re.compile(r"\$[A-Za-z]\w*")

Variables = dict[str, Any]


class _Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT: Final = _Absent()
"""The value of a field that a message does not have."""


class Mismatch(Exception):
    """A message does not match its pattern. The text names the path of the field."""


def match(pattern: Any, value: Any, variables: Variables, path: str = "") -> None:
    """Compare a value with a pattern. Variables that have no value yet get one.

    Raises:
        Mismatch: if the value does not match. Then some variables may have been bound.

    """
    if isinstance(pattern, dict) and any(key.startswith("$") for key in pattern):
        fields = {key: part for key, part in pattern.items() if not key.startswith("$")}
        if fields:
            _match_object(fields, value, variables, path)
        for operator in pattern.keys() - fields.keys():
            _OPERATORS[operator](pattern[operator], value, variables, path)
    elif isinstance(pattern, dict):
        _match_object(pattern, value, variables, path)
    elif isinstance(pattern, list):
        _match_list(pattern, value, variables, path)
    elif isinstance(pattern, str) and VARIABLE.fullmatch(pattern):
        _match_variable(pattern, value, variables, path)
    else:
        expected = substitute(pattern, variables)
        if value != expected or isinstance(value, bool) != isinstance(expected, bool):
            raise Mismatch(f"{path or 'value'} is {show(value)}, expected {show(expected)}")


def matches(pattern: Any, value: Any, variables: Variables) -> bool:
    """Return whether a value matches. Variables are bound only if it does."""
    trial = dict(variables)
    try:
        match(pattern, value, trial)
    except Mismatch:
        return False
    variables.update(trial)
    return True


def _match_object(pattern: dict[str, Any], value: Any, variables: Variables, path: str) -> None:
    """Compare the fields that the pattern names. The value may have other fields."""
    if not isinstance(value, dict):
        raise Mismatch(f"{path or 'value'} is {show(value)}, expected an object")
    for key, part in pattern.items():
        match(part, value.get(key, ABSENT), variables, f"{path}.{key}" if path else key)


def _match_list(pattern: list[Any], value: Any, variables: Variables, path: str) -> None:
    """Compare a list, element by element."""
    if not isinstance(value, list) or len(value) != len(pattern):
        raise Mismatch(f"{path or 'value'} is {show(value)}, expected a list of {len(pattern)}")
    for index, (part, element) in enumerate(zip(pattern, value, strict=True)):
        match(part, element, variables, f"{path}[{index}]")


def _match_variable(name: str, value: Any, variables: Variables, path: str) -> None:
    """Bind a variable without a value, or compare with its value."""
    if value is ABSENT:
        raise Mismatch(f"{path} is missing")
    if name not in variables:
        variables[name] = value
    elif variables[name] != value:
        raise Mismatch(f"{path} is {show(value)}, expected {show(variables[name])}, the value of {name}")


def _match_unordered(patterns: list[Any], value: Any, variables: Variables, path: str) -> None:
    """Compare a list with patterns in any order. Each pattern takes the first element that matches."""
    if not isinstance(value, list) or len(value) != len(patterns):
        raise Mismatch(f"{path or 'value'} is {show(value)}, expected {len(patterns)} elements in any order")
    remaining = list(value)
    for pattern in patterns:
        for element in remaining:
            if matches(pattern, element, variables):
                remaining.remove(element)
                break
        else:
            raise Mismatch(f"{path or 'value'}: nothing in {show(remaining)} matches {show(pattern)}")


def _number(test: Callable[[Any, Any], bool], words: str) -> Callable[[Any, Any, Variables, str], None]:
    """Return an operator that compares numbers."""

    def compare(operand: Any, value: Any, variables: Variables, path: str) -> None:
        bound = substitute(operand, variables)
        if isinstance(value, bool) or not isinstance(value, int | float) or not test(value, bound):
            raise Mismatch(f"{path or 'value'} is {show(value)}, expected a number {words} {show(bound)}")

    return compare


def _match_absent(_: Any, value: Any, __: Variables, path: str) -> None:
    if value is not ABSENT:
        raise Mismatch(f"{path} is {show(value)}, but the field must be missing")


def _match_any(_: Any, value: Any, __: Variables, path: str) -> None:
    if value is ABSENT:
        raise Mismatch(f"{path} is missing")


def _match_type(operand: Any, value: Any, _: Variables, path: str) -> None:
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "list": list,
        "object": dict,
    }
    if not isinstance(value, kinds[operand]) or (isinstance(value, bool) and operand != "boolean"):
        raise Mismatch(f"{path or 'value'} is {show(value)}, expected: {operand}")


def _match_prefix(operand: Any, value: Any, variables: Variables, path: str) -> None:
    prefix = substitute(operand, variables)
    if not isinstance(value, str) or not value.startswith(prefix):
        raise Mismatch(f"{path or 'value'} is {show(value)}, expected a string that begins with {prefix!r}")


def _match_contains(operand: Any, value: Any, variables: Variables, path: str) -> None:
    if isinstance(value, str):
        if substitute(operand, variables) not in value:
            raise Mismatch(f"{path or 'value'} is {show(value)}, expected to contain {show(operand)}")
    elif not isinstance(value, list) or not all(
        any(matches(part, element, variables) for element in value) for part in operand
    ):
        raise Mismatch(f"{path or 'value'} is {show(value)}, expected to contain {show(operand)}")


def _match_one_of(operand: Any, value: Any, variables: Variables, path: str) -> None:
    if not any(matches(part, value, variables) for part in operand):
        raise Mismatch(f"{path or 'value'} is {show(value)}, expected one of {show(operand)}")


def _match_not(operand: Any, value: Any, variables: Variables, path: str) -> None:
    if matches(operand, value, dict(variables)):
        raise Mismatch(f"{path or 'value'} is {show(value)}, which must not match {show(operand)}")


def _match_length(operand: Any, value: Any, _: Variables, path: str) -> None:
    least, most = operand
    if not isinstance(value, str | list) or not least <= len(value) <= most:
        raise Mismatch(f"{path or 'value'} is {show(value)}, expected a length of {least} to {most}")


def _match_bind(operand: Any, value: Any, variables: Variables, path: str) -> None:
    _match_variable(operand, value, variables, path)


def _match_only(operand: Any, value: Any, variables: Variables, path: str) -> None:
    """Compare an object that may have no other fields than those of the pattern."""
    match(operand, value, variables, path)
    other = sorted(set(value) - set(operand))
    if other:
        raise Mismatch(f"{path or 'value'} has the fields {other}, which must be missing")


_OPERATORS: Final[dict[str, Callable[[Any, Any, Variables, str], None]]] = {
    "$above": _number(lambda value, bound: value > bound, "above"),
    "$below": _number(lambda value, bound: value < bound, "below"),
    "$atLeast": _number(lambda value, bound: value >= bound, "of at least"),
    "$atMost": _number(lambda value, bound: value <= bound, "of at most"),
    "$absent": _match_absent,
    "$any": _match_any,
    "$bind": _match_bind,
    "$contains": _match_contains,
    "$length": _match_length,
    "$not": _match_not,
    "$oneOf": _match_one_of,
    "$only": _match_only,
    "$prefix": _match_prefix,
    "$type": _match_type,
    "$unordered": _match_unordered,
}


def substitute(value: Any, variables: Variables) -> Any:
    """Return a value to send: variables replaced, `{run}` in strings replaced, generated values computed.

    Raises KeyError for a variable without a value: a mistake in the case.
    """
    if isinstance(value, str):
        text = variables[value] if VARIABLE.fullmatch(value) else value
        return text.replace("{run}", variables.get("run", "")) if isinstance(text, str) else text
    if isinstance(value, list):
        return [substitute(part, variables) for part in value]
    if isinstance(value, dict):
        return _substitute_object(value, variables)
    return value


def _substitute_object(value: dict[str, Any], variables: Variables) -> Any:
    """Substitute in the fields of an object, or generate the value that it describes."""
    if "$repeat" in value:  # a long string: a beginning, and a part that is repeated
        first, part, times = value["$repeat"]
        return substitute(first, variables) + part * times
    if "$list" in value:  # a long list: `{i}` in a string is the index
        template, length = value["$list"]
        return [substitute(_with_index(template, index), variables) for index in range(length)]
    if "$add" in value:
        return sum(substitute(value["$add"], variables))
    return {key: substitute(part, variables) for key, part in value.items()}


def _with_index(template: Any, index: int) -> Any:
    """Replace `{i}` in every string of a template; the string `"{i}"` alone becomes the number."""
    if isinstance(template, str):
        return index if template == "{i}" else template.replace("{i}", str(index))
    if isinstance(template, list):
        return [_with_index(part, index) for part in template]
    if isinstance(template, dict):
        return {key: _with_index(part, index) for key, part in template.items()}
    return template


def show(value: Any, limit: int = 300) -> str:
    """Return a value as short text for people."""
    text = repr(value) if value is ABSENT else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
