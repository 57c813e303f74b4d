"""The client for threads: `genie.sync.connect()` is `genie.connect()` without `await`."""

from genie.client.sync import Client, connect
from genie.client.sync_lock import Lock, LockContext

__all__ = ["Client", "Lock", "LockContext", "connect"]
