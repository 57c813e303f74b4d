"""The clients: a sans-I/O protocol state machine (`session`), and I/O layers for asyncio and for threads."""
