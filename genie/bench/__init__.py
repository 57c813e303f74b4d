"""The load generator of `genie bench`.

`generator` defines the workloads and the protocol state of one connection, without I/O. `runner` opens the connections,
measures, and releases all locks at the end. `histogram` counts durations.
"""
