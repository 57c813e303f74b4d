"""The clients: one core that knows the protocol and no sockets, and a shell around it for asyncio and one for threads."""
