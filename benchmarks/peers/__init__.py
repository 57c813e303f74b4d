"""The same locking work, done by Genie and by what else one could use for it: `python -m benchmarks.peers`."""
