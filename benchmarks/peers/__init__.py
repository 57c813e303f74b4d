"""The same locking workload on Genie and on alternatives: `python -m benchmarks.peers`."""
