"""The kinds of database that a ledger can be in. One file each."""
