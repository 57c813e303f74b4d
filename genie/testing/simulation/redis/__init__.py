"""A Redis in memory, with replication, sentinels and scripts, for the simulation."""
