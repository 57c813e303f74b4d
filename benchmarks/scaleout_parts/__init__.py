"""The parts of `benchmarks/scaleout.py`."""
