"""Token selection for replicas that share wallets: selected tokens are locked in Genie.

`SherdlockSelector` is the public class; `search.py` explains how tokens are found.
"""

from genie_tokens.sherdlock.selector import SherdlockSelector

__all__ = ["SherdlockSelector"]
