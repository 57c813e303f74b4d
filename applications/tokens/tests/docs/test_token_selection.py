"""docs/token-selection.md : its tables agree with the code."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec

from pages import code, errors_of, prose, table

import genie_tokens as tokens

PAGE = "applications/tokens/docs/token-selection.md"


def test_every_error_is_there() -> None:
    assert {code(row["Error"]) for row in table(PAGE, "Error")} == errors_of(tokens)


def test_the_calls_are_the_code_s() -> None:
    """Every argument that is named is there, with the default that is shown, and none is missing."""
    owners = {
        "selector": [tokens.SherdlockSelector, tokens.InMemorySelector],
        "store": [tokens.MemoryTokenStore, tokens.SqlTokenStore],
        "selection": [tokens.Selection],
    }
    checked = 0
    for row in table(PAGE, "Call"):
        for call, arguments in re.findall(r"`([A-Za-z._]+)\((.*?)\)`", row["Call"]):
            owner, _, name = call.rpartition(".")
            if arguments == "…":
                continue
            candidates = owners[owner] if owner else [tokens]
            real = next(getattr(thing, name) for thing in candidates if hasattr(thing, name))
            parameters = dict(inspect.signature(real).parameters)
            parameters.pop("self", None)
            shown = {}
            for argument in arguments.replace("owner or account", "owner, account").split(", ") if arguments else ():
                parameter, _, default = argument.partition("=")
                shown[parameter] = default
            left_out = {"prefer"} if name == "select" else set()
            assert set(shown) == set(parameters) - left_out, call
            for parameter, default in shown.items():
                if default:
                    assert repr(parameters[parameter].default) == default, (call, parameter)
            checked += 1
    assert checked >= 10


def test_every_name_of_the_package_exists() -> None:
    for name in re.findall(r"`genie_tokens\.(\w+)`", "\n".join(prose(PAGE))):
        assert hasattr(tokens, name) or find_spec(f"genie_tokens.{name}"), name
    for name in tokens.__all__:
        assert getattr(tokens, name) is not None
