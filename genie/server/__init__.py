"""The asyncio shell around the lock manager: sockets, group commit, start and stop."""
