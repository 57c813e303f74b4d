"""A Redis in memory, alone or with replicas and sentinels, for the simulated network."""
