"""The load that `genie bench` puts on a running server. One file without sockets decides, one with them carries it out.

`histogram` counts durations, `workloads` says what is asked for, `cycles` is one connection's part of the load, from
bytes to bytes, and `load` connects, keeps the time and cleans up.
"""
