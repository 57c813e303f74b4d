"""Helpers for applications that keep the data which Genie's locks protect in an SQL database (extra `sql`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.sql.fences import FencedTable

__all__ = ["FencedTable"]


def __getattr__(name: str) -> object:
    """Import a public name on first access, because it needs SQLAlchemy, an optional dependency."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        globals()[name] = value = getattr(import_module("genie.sql.fences"), name)
    except ModuleNotFoundError as error:
        if error.name != "sqlalchemy":
            raise
        raise ModuleNotFoundError(f"{name} needs SQLAlchemy: pip install 'genie-lock[sql]'", name=error.name) from None
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
