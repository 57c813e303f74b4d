"""The stores in which locks survive the server: the protocol `Store`, and its implementations in memory and in Redis."""
