"""The client for threads: `genie.sync.connect()` is `genie.connect()` without `await`."""

from genie.client.sync import Client, connect
from genie.client.sync_lock import Hold, Lock

__all__ = ["Client", "Hold", "Lock", "connect"]
