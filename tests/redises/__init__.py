"""Redis deployments of real processes on free ports: a master with replicas and sentinels, and a cluster.

`node` is one process, `sentinels` and `cluster` are the deployments, and `group` is what both have in common.
"""
