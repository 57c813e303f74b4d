"""Choosing tokens in replicas that share wallets: what each of them holds is locked in Genie.

`selector` is what users have, `search` says how tokens are found.
"""

from genie.tokens.sherdlock.selector import SherdlockSelector

__all__ = ["SherdlockSelector"]
