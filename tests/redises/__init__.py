"""Redis as it is run by those who want it to survive a machine: a master with replicas and sentinels, and a cluster.

Real processes on free ports of the loopback. `node` is one of them, `sentinels` and `cluster` are the grounds, `crowd` is
what both have in common.
"""
