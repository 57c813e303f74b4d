"""The client for threads: `genie.sync.connect()` is `genie.connect()` without `await`."""

from genie.client.sync import Client, Hold, Lock, connect

__all__ = ["Client", "Hold", "Lock", "connect"]
