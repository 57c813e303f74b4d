"""The store in Redis: commits, the replication log, leader election, and the connection to the primary."""
