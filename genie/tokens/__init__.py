"""Choosing unspent tokens that together reach an amount, and holding them until they are spent.

`SherdlockSelector` is for replicas that share wallets: what each of them holds is locked in Genie.
`InMemorySelector` is for one process that has its tokens to itself. Both read a `TokenStore`.
"""
