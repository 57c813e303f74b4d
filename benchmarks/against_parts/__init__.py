"""Parts of `benchmarks/against.py`."""
