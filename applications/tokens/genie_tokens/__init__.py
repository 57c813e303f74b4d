"""Token selection: choosing unspent tokens that together reach an amount, and holding them until
they are spent.

`SherdlockSelector` is for replicas that share wallets: it locks the tokens that it holds in Genie.
`InMemorySelector` is for wallets that only one process uses. Both read a `TokenStore`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from genie_tokens.errors import FundsLocked, InsufficientFunds, SelectionEnded, SpentAlready, TooManyTokens
from genie_tokens.selection import Selection
from genie_tokens.store import Added, Change, Resync, Spent, TokenStore
from genie_tokens.token import Token

if TYPE_CHECKING:
    from genie_tokens.in_memory import InMemorySelector
    from genie_tokens.sherdlock import SherdlockSelector
    from genie_tokens.stores.memory import MemoryTokenStore
    from genie_tokens.stores.sql import SqlTokenStore

__all__ = [
    "Added",
    "Change",
    "FundsLocked",
    "InMemorySelector",
    "InsufficientFunds",
    "MemoryTokenStore",
    "Resync",
    "Selection",
    "SelectionEnded",
    "SherdlockSelector",
    "Spent",
    "SpentAlready",
    "SqlTokenStore",
    "Token",
    "TokenStore",
    "TooManyTokens",
]

_LAZY_IMPORTS = {
    "InMemorySelector": "genie_tokens.in_memory",
    "MemoryTokenStore": "genie_tokens.stores.memory",
    "SherdlockSelector": "genie_tokens.sherdlock",
    "SqlTokenStore": "genie_tokens.stores.sql",
}


def __getattr__(name: str) -> object:
    """Import a public name on its first use, because some names need optional packages. Raises
    ModuleNotFoundError with the command that installs these packages if they are missing.
    """
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_LAZY_IMPORTS[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("sqlalchemy", "aiosqlite", "asyncpg"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs more packages: pip install 'genie-tokens[sqlite]' or 'genie-tokens[postgres]'",
            name=error.name,
        ) from None
    globals()[name] = value  # later uses of the name do not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
