"""The client for threads: `genie.sync.connect()` is `genie.connect()` without `await`."""

from genie.client.sync import Client, Lock, LockContext, Transaction, TransactionContext, connect

__all__ = ["Client", "Lock", "LockContext", "Transaction", "TransactionContext", "connect"]
