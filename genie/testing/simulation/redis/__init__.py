"""A simulated Redis in memory: the commands that Genie uses, scripts, loss of writes, replication and sentinels."""
