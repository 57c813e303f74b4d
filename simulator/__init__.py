"""Finds defects of the lock server: clusters with faults, simulated from a seed, and checkers of their histories. See README.md."""
